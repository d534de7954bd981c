"""Ranks and flat arrays: who is where, and how memory moves between them.

Nothing here knows of strategies, replicas or gradients.
"""

from mpidist.transport import arrays as arrays
from mpidist.transport import cuda as cuda
from mpidist.transport.agreement import Arrival as Arrival
from mpidist.transport.agreement import Joining as Joining
from mpidist.transport.agreement import differing as differing
from mpidist.transport.communicator import Communicator as Communicator
from mpidist.transport.communicator import shard_bounds as shard_bounds
from mpidist.transport.costs import CostModel as CostModel
from mpidist.transport.costs import Placement as Placement
from mpidist.transport.costs import TuningKey as TuningKey
from mpidist.transport.costs import load_tuned as load_tuned
from mpidist.transport.costs import measure_cost_model as measure_cost_model
from mpidist.transport.costs import name_placement as name_placement
from mpidist.transport.costs import save_cost_model as save_cost_model
from mpidist.transport.costs import tuning_path as tuning_path
from mpidist.transport.cuda import nccl_version_text as nccl_version_text
from mpidist.transport.device_over_mpi import ProbeKey as ProbeKey
from mpidist.transport.device_over_mpi import cuda_aware_probe as cuda_aware_probe
from mpidist.transport.devices import Device as Device
from mpidist.transport.devices import choose_device as choose_device
from mpidist.transport.failures import FILE_VERSION as FILE_VERSION
from mpidist.transport.failures import ends_normally as ends_normally
from mpidist.transport.failures import open_groups as open_groups
from mpidist.transport.fingerprint import fingerprint_of as fingerprint_of
from mpidist.transport.gpu import Launched as Launched
from mpidist.transport.group import DeviceLevels as DeviceLevels
from mpidist.transport.group import Levels as Levels
from mpidist.transport.group import NcclReach as NcclReach
from mpidist.transport.group import Pending as Pending
from mpidist.transport.group import Steps as Steps
from mpidist.transport.group import SyncGroup as SyncGroup
from mpidist.transport.group import all_reduce_between_nodes as all_reduce_between_nodes
from mpidist.transport.group import compression as compression
from mpidist.transport.group import reduce_scatter_between_nodes as reduce_scatter_between_nodes
from mpidist.transport.half import bfloat16 as bfloat16
from mpidist.transport.mpi import Intracomm as Intracomm
from mpidist.transport.mpi import load_mpi as load_mpi
from mpidist.transport.mpi import ring_all_reduce as ring_all_reduce
from mpidist.transport.nccl import DeviceQueue as DeviceQueue
from mpidist.transport.nccl import GpuFacts as GpuFacts
from mpidist.transport.nccl import reason_against_nccl as reason_against_nccl
from mpidist.transport.reduction import Reduction as Reduction
from mpidist.transport.reduction import accumulator_dtype as accumulator_dtype
from mpidist.transport.reduction import is_half as is_half
from mpidist.transport.shared_memory import InPlace as InPlace
from mpidist.transport.shared_memory import Place as Place
from mpidist.transport.shared_memory import Schedule as Schedule
from mpidist.transport.shared_memory import SharedArrays as SharedArrays
from mpidist.transport.shared_memory import Stream as Stream
from mpidist.transport.shared_memory import StreamReducer as StreamReducer
from mpidist.transport.shared_memory import Transfer as Transfer
from mpidist.transport.shared_memory import word_of as word_of
from mpidist.transport.text import count_text as count_text
from mpidist.transport.text import first_line as first_line
from mpidist.transport.text import name_ranks as name_ranks
from mpidist.transport.text import size_text as size_text
from mpidist.transport.text import text_of as text_of
from mpidist.transport.text import value_text as value_text
from mpidist.transport.topology import Topology as Topology
from mpidist.transport.waiting import complete as complete

__all__ = [
    "Arrival",
    "Communicator",
    "CostModel",
    "Device",
    "DeviceLevels",
    "DeviceQueue",
    "FILE_VERSION",
    "GpuFacts",
    "InPlace",
    "Intracomm",
    "Joining",
    "Launched",
    "Levels",
    "NcclReach",
    "Pending",
    "Place",
    "Placement",
    "ProbeKey",
    "Reduction",
    "Schedule",
    "SharedArrays",
    "Steps",
    "Stream",
    "StreamReducer",
    "SyncGroup",
    "Topology",
    "Transfer",
    "TuningKey",
    "accumulator_dtype",
    "all_reduce_between_nodes",
    "arrays",
    "bfloat16",
    "choose_device",
    "complete",
    "compression",
    "count_text",
    "cuda",
    "cuda_aware_probe",
    "differing",
    "ends_normally",
    "fingerprint_of",
    "first_line",
    "is_half",
    "load_mpi",
    "load_tuned",
    "measure_cost_model",
    "name_placement",
    "name_ranks",
    "nccl_version_text",
    "open_groups",
    "reason_against_nccl",
    "reduce_scatter_between_nodes",
    "ring_all_reduce",
    "save_cost_model",
    "shard_bounds",
    "size_text",
    "text_of",
    "tuning_path",
    "value_text",
    "word_of",
]
