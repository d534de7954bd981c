"""How long which way takes: the cost model, and what was measured for it."""

from mpidist.transport.costs.cost_file import TuningKey, load_tuned, save_cost_model, tuning_path
from mpidist.transport.costs.cost_model import LEADER_BYTES, NEVER, CostModel, Placement, name_placement

__all__ = [
    "CostModel",
    "LEADER_BYTES",
    "NEVER",
    "Placement",
    "TuningKey",
    "load_tuned",
    "name_placement",
    "save_cost_model",
    "tuning_path",
]
