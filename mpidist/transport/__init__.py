"""Ranks and flat arrays: the nodes of the ranks, and how memory moves between ranks.

Nothing here depends on strategies, replicas or gradients.
"""

from mpidist.transport import arrays, cuda
from mpidist.transport.agreement import Call, CallRecord, StopNotice, fingerprint_of, mismatch_error, name_digest
from mpidist.transport.array_libraries import copied, library_of, writable_like
from mpidist.transport.arrays import bytes_of
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.costs import (
    LEADER_BYTES,
    NEVER,
    CostModel,
    Placement,
    TuningKey,
    load_tuned,
    name_placement,
    save_cost_model,
    tuning_path,
)
from mpidist.transport.cuda import nccl_version_text
from mpidist.transport.devices import Device, are_several_gpus, choose_device, on_device, wait_for_devices
from mpidist.transport.failures import FILE_VERSION, AwaitedPeers, ends_normally, open_groups
from mpidist.transport.gpu import Launched, NewArrays, PackLayout, change_rows_of_gpu
from mpidist.transport.group import (
    DeviceLevels,
    ErrorReport,
    Levels,
    NcclReach,
    Pending,
    Service,
    ServiceGroup,
    Steps,
    SyncGroup,
    Workplace,
    all_reduce_rows,
    forbid_calls_here,
    meet_ranks,
    narrow,
    raise_reported,
    raise_together,
    traced,
    widen,
)
from mpidist.transport.half import bfloat16, dtype_named, is_of_numpy
from mpidist.transport.host_memory import LentArrays, RecycledResults, ResultMemory, SumMemory, node_bytes
from mpidist.transport.mpi import (
    LAUNCHER_PREFIXES,
    Intracomm,
    is_process_failure,
    launcher_here,
    launcher_text,
    let_first_rank_end,
    load_mpi,
    rank_from_environment,
    ring_all_reduce,
)
from mpidist.transport.native import native
from mpidist.transport.nccl import DeviceQueue, GpuFacts, GpusOfProcess, reason_against_nccl
from mpidist.transport.node_memory import LINE_BYTES, Place, SharedArena, SharedArrays, places_digest
from mpidist.transport.reduction import Reduction, accumulator_dtype, is_low_precision
from mpidist.transport.settings import unknown_settings
from mpidist.transport.shared_errors import is_shared, mark_left, mark_shared, repeat_of
from mpidist.transport.shared_memory import (
    FusedArrays,
    FusedReducer,
    InPlace,
    OneShot,
    Schedule,
    SharedMemoryCommunicator,
    TwoShot,
)
from mpidist.transport.text import count_text, first_line, name_ranks, size_text, text_of, time_text, value_text
from mpidist.transport.topology import Topology
from mpidist.transport.trace import TRACE_VERSION, ClockSample
from mpidist.transport.tree import Fold, ReplicaTree
from mpidist.transport.waiting import complete, never_free, poll

__all__ = [
    "LentArrays",
    "RecycledResults",
    "ResultMemory",
    "SumMemory",
    "Call",
    "CallRecord",
    "Array",
    "AwaitedPeers",
    "ClockSample",
    "Communicator",
    "CostModel",
    "Device",
    "DeviceLevels",
    "DeviceQueue",
    "GpusOfProcess",
    "ErrorReport",
    "FILE_VERSION",
    "Fold",
    "GpuFacts",
    "InPlace",
    "Intracomm",
    "LAUNCHER_PREFIXES",
    "LEADER_BYTES",
    "LINE_BYTES",
    "Launched",
    "Levels",
    "NEVER",
    "NcclReach",
    "NewArrays",
    "PackLayout",
    "Pending",
    "OneShot",
    "Place",
    "Placement",
    "Reduction",
    "ReplicaTree",
    "Schedule",
    "Service",
    "ServiceGroup",
    "SharedArena",
    "SharedArrays",
    "SharedMemoryCommunicator",
    "Steps",
    "StopNotice",
    "FusedArrays",
    "FusedReducer",
    "SyncGroup",
    "TRACE_VERSION",
    "Topology",
    "TwoShot",
    "TuningKey",
    "Workplace",
    "accumulator_dtype",
    "all_reduce_rows",
    "arrays",
    "bfloat16",
    "bytes_of",
    "are_several_gpus",
    "change_rows_of_gpu",
    "choose_device",
    "copied",
    "library_of",
    "on_device",
    "complete",
    "narrow",
    "count_text",
    "cuda",
    "mismatch_error",
    "dtype_named",
    "ends_normally",
    "fingerprint_of",
    "first_line",
    "forbid_calls_here",
    "is_low_precision",
    "is_of_numpy",
    "is_shared",
    "is_process_failure",
    "launcher_here",
    "launcher_text",
    "let_first_rank_end",
    "load_mpi",
    "native",
    "load_tuned",
    "mark_left",
    "mark_shared",
    "meet_ranks",
    "name_placement",
    "name_digest",
    "name_ranks",
    "node_bytes",
    "nccl_version_text",
    "never_free",
    "open_groups",
    "poll",
    "rank_from_environment",
    "raise_reported",
    "raise_together",
    "reason_against_nccl",
    "widen",
    "repeat_of",
    "ring_all_reduce",
    "save_cost_model",
    "shard_bounds",
    "size_text",
    "text_of",
    "time_text",
    "unknown_settings",
    "traced",
    "tuning_path",
    "value_text",
    "wait_for_devices",
    "places_digest",
    "writable_like",
]
