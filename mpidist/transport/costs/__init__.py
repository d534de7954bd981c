"""How long an all-reduce takes: the cost model, and the file of measured numbers."""

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
