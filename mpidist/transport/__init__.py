"""Ranks and flat arrays: the nodes of the ranks, and how memory moves between ranks.

Nothing here depends on strategies, replicas or gradients.
"""

from mpidist.transport import arrays, cuda
from mpidist.transport.agreement import Call, CallRecord, StopNotice, fingerprint_of, mismatch_error
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
from mpidist.transport.device_over_mpi import takes_device_memory
from mpidist.transport.devices import Device, are_several_gpus, choose_device, on_device, wait_for_devices
from mpidist.transport.failures import FILE_VERSION, AwaitedPeers, ends_normally, open_groups
from mpidist.transport.gpu import Launched, change_rows_of_gpu
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
    all_reduce_rows,
    meet_ranks,
    narrow,
    raise_reported,
    raise_together,
    widen,
)
from mpidist.transport.half import bfloat16, dtype_named
from mpidist.transport.mpi import Intracomm, is_process_failure, load_mpi, ring_all_reduce
from mpidist.transport.nccl import DeviceQueue, GpuFacts, GpusOfProcess, read_boot_id, reason_against_nccl
from mpidist.transport.reduction import Reduction, accumulator_dtype, is_half
from mpidist.transport.settings import unknown_settings
from mpidist.transport.shared_errors import is_shared, is_shared_by, mark_left, mark_shared, repeat_of
from mpidist.transport.shared_memory import (
    LINE_BYTES,
    FusedArrays,
    FusedReducer,
    InPlace,
    Place,
    Schedule,
    SharedArena,
    SharedArrays,
    SharedMemoryCommunicator,
    TwoShot,
    places_digest,
)
from mpidist.transport.text import count_text, first_line, name_ranks, size_text, text_of, time_text, value_text
from mpidist.transport.topology import Topology
from mpidist.transport.tree import Fold, ReplicaTree
from mpidist.transport.waiting import complete, never_free, poll

__all__ = [
    "Call",
    "CallRecord",
    "Array",
    "AwaitedPeers",
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
    "LEADER_BYTES",
    "LINE_BYTES",
    "Launched",
    "Levels",
    "NEVER",
    "NcclReach",
    "Pending",
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
    "Topology",
    "TwoShot",
    "TuningKey",
    "accumulator_dtype",
    "all_reduce_rows",
    "arrays",
    "bfloat16",
    "bytes_of",
    "are_several_gpus",
    "change_rows_of_gpu",
    "choose_device",
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
    "is_half",
    "is_shared",
    "is_process_failure",
    "is_shared_by",
    "load_mpi",
    "load_tuned",
    "mark_left",
    "mark_shared",
    "meet_ranks",
    "name_placement",
    "name_ranks",
    "nccl_version_text",
    "never_free",
    "open_groups",
    "poll",
    "raise_reported",
    "raise_together",
    "read_boot_id",
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
    "tuning_path",
    "value_text",
    "wait_for_devices",
    "places_digest",
    "takes_device_memory",
]
