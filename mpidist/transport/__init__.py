"""Ranks and flat arrays: who is where, and how memory moves between them.

Nothing here knows of strategies, replicas or gradients.
"""

from mpidist.transport import arrays as arrays
from mpidist.transport import cuda as cuda
from mpidist.transport.agreement import Call as Call
from mpidist.transport.agreement import CallRecord as CallRecord
from mpidist.transport.agreement import differing as differing
from mpidist.transport.communicator import Array as Array
from mpidist.transport.communicator import Communicator as Communicator
from mpidist.transport.communicator import shard_bounds as shard_bounds
from mpidist.transport.costs import CostModel as CostModel
from mpidist.transport.costs import Placement as Placement
from mpidist.transport.costs import TuningKey as TuningKey
from mpidist.transport.costs import load_tuned as load_tuned
from mpidist.transport.costs import name_placement as name_placement
from mpidist.transport.costs import save_cost_model as save_cost_model
from mpidist.transport.costs import tuning_path as tuning_path
from mpidist.transport.cuda import nccl_version_text as nccl_version_text
from mpidist.transport.device_over_mpi import takes_device_memory as takes_device_memory
from mpidist.transport.devices import Device as Device
from mpidist.transport.devices import choose_device as choose_device
from mpidist.transport.failures import FILE_VERSION as FILE_VERSION
from mpidist.transport.failures import ends_normally as ends_normally
from mpidist.transport.failures import open_groups as open_groups
from mpidist.transport.fingerprint import fingerprint_of as fingerprint_of
from mpidist.transport.gpu import Launched as Launched
from mpidist.transport.group import DeviceLevels as DeviceLevels
from mpidist.transport.group import ErrorReport as ErrorReport
from mpidist.transport.group import Levels as Levels
from mpidist.transport.group import NcclReach as NcclReach
from mpidist.transport.group import Pending as Pending
from mpidist.transport.group import Steps as Steps
from mpidist.transport.group import SyncGroup as SyncGroup
from mpidist.transport.group import narrow as narrow
from mpidist.transport.group import raise_reported as raise_reported
from mpidist.transport.group import raise_together as raise_together
from mpidist.transport.group import widen as widen
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
from mpidist.transport.shared_errors import mark_shared as mark_shared
from mpidist.transport.shared_memory import FusedArrays as FusedArrays
from mpidist.transport.shared_memory import FusedReducer as FusedReducer
from mpidist.transport.shared_memory import InPlace as InPlace
from mpidist.transport.shared_memory import Place as Place
from mpidist.transport.shared_memory import Schedule as Schedule
from mpidist.transport.shared_memory import SharedArrays as SharedArrays
from mpidist.transport.shared_memory import SharedMemoryCommunicator as SharedMemoryCommunicator
from mpidist.transport.shared_memory import TwoShot as TwoShot
from mpidist.transport.shared_memory import placement_digest as placement_digest
from mpidist.transport.text import count_text as count_text
from mpidist.transport.text import first_line as first_line
from mpidist.transport.text import name_ranks as name_ranks
from mpidist.transport.text import size_text as size_text
from mpidist.transport.text import text_of as text_of
from mpidist.transport.text import value_text as value_text
from mpidist.transport.topology import Topology as Topology
from mpidist.transport.waiting import complete as complete

__all__ = [
    "Call",
    "CallRecord",
    "Array",
    "Communicator",
    "CostModel",
    "Device",
    "DeviceLevels",
    "DeviceQueue",
    "ErrorReport",
    "FILE_VERSION",
    "GpuFacts",
    "InPlace",
    "Intracomm",
    "Launched",
    "Levels",
    "NcclReach",
    "Pending",
    "Place",
    "Placement",
    "Reduction",
    "Schedule",
    "SharedArrays",
    "SharedMemoryCommunicator",
    "Steps",
    "FusedArrays",
    "FusedReducer",
    "SyncGroup",
    "Topology",
    "TwoShot",
    "TuningKey",
    "accumulator_dtype",
    "arrays",
    "bfloat16",
    "choose_device",
    "complete",
    "narrow",
    "count_text",
    "cuda",
    "differing",
    "ends_normally",
    "fingerprint_of",
    "first_line",
    "is_half",
    "load_mpi",
    "load_tuned",
    "mark_shared",
    "name_placement",
    "name_ranks",
    "nccl_version_text",
    "open_groups",
    "raise_reported",
    "raise_together",
    "reason_against_nccl",
    "widen",
    "ring_all_reduce",
    "save_cost_model",
    "shard_bounds",
    "size_text",
    "text_of",
    "tuning_path",
    "value_text",
    "placement_digest",
    "takes_device_memory",
]
