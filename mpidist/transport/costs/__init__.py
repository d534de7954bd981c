"""How long which way takes: the cost model, and what was measured for it."""

from mpidist.transport.costs.cost_file import TuningKey as TuningKey
from mpidist.transport.costs.cost_file import load_cost_model as load_cost_model
from mpidist.transport.costs.cost_file import load_tuned as load_tuned
from mpidist.transport.costs.cost_file import save_cost_model as save_cost_model
from mpidist.transport.costs.cost_file import tuning_path as tuning_path
from mpidist.transport.costs.cost_model import CostModel as CostModel
from mpidist.transport.costs.cost_model import Placement as Placement
from mpidist.transport.costs.cost_model import name_placement as name_placement

__all__ = [
    "CostModel",
    "Placement",
    "TuningKey",
    "load_cost_model",
    "load_tuned",
    "name_placement",
    "save_cost_model",
    "tuning_path",
]
