"""Options of distributed data sets, and the argument of the functions that make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpidist.options import CaseInsensitiveEnum
from mpidist.whole_number import require_bool, whole_number

__all__ = ["AutoShardPolicy", "InputContext", "InputOptions", "InputReplicationMode"]


@final
class InputReplicationMode(CaseInsensitiveEnum):
    """Number of input pipelines: one on every rank, or one for every replica.

    Both mean the same, unless the number of replicas was chosen.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
class AutoShardPolicy(CaseInsensitiveEnum):
    """Policy of dealing batches to replicas: to ranks, unless the number of replicas was chosen.

    `OFF`: every replica gets all batches. `FILE`: it gets those of whole files. `DATA`: every rank reads all, and
    replicas take batches in turn. `AUTO`: of `Files`, `FILE` if there are as many files as replicas, else `DATA`; of
    global batches a part of each; what a function makes for a rank stays as it is. `HINT` is refused: there is no graph
    in which it could mark a place.
    """

    OFF = "OFF"
    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"


@final
@dataclass(frozen=True, init=False)
class InputOptions:
    """Where a distributed data set puts batches, and how far it reads ahead.

    Args:
        experimental_fetch_to_device: Copy batches to this rank's device, if that is a GPU. `None` means to copy them to
            a GPU that was named to the strategy, and not to a GPU that the strategy found: a NumPy program gets NumPy
            arrays.
        experimental_replication_mode: An `InputReplicationMode` or its name. `PER_REPLICA` is for
            `distribute_datasets_from_function` alone.
        experimental_place_dataset_on_device: The function of `distribute_datasets_from_function` makes its batches on
            the device, so they are not copied. Needs `PER_REPLICA`, and excludes `experimental_fetch_to_device`.
        experimental_per_replica_buffer_size: Number of batches, of each replica, that may be in memory at a time. With
            more than 1, a thread reads ahead while the program works on one batch.
        auto_shard_policy: An `AutoShardPolicy` or its name: how batches of `Files` are dealt out. `FILE` and `DATA`
            also deal out those of `distribute_datasets_from_function`; its function is then called as for one pipeline.

    Raises:
        TypeError: If a flag is not a bool, or the buffer's size not a whole number.
        ValueError: If the mode or the policy is not known, the buffer's size is less than 1, or options exclude each
            other.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __init__(
        self,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO,
    ) -> None:
        place, size = experimental_place_dataset_on_device, experimental_per_replica_buffer_size
        fetch = experimental_fetch_to_device
        if fetch is not None:
            fetch = require_bool("experimental_fetch_to_device", fetch, "None")
        place = require_bool("experimental_place_dataset_on_device", place)
        mode = InputReplicationMode(experimental_replication_mode)
        size = whole_number("experimental_per_replica_buffer_size, in batches,", size, 1)
        policy = AutoShardPolicy(auto_shard_policy)
        if policy is AutoShardPolicy.HINT:
            raise ValueError(
                "auto_shard_policy=HINT is for a graph of tf.data, in which a call of `shard` marks a place; here take "
                "FILE or DATA, or call `Files.shard`"
            )
        if place and mode is not InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "experimental_place_dataset_on_device needs experimental_replication_mode=PER_REPLICA: each replica "
                "makes its batches on its device"
            )
        if place and fetch:
            raise ValueError(
                "experimental_place_dataset_on_device and experimental_fetch_to_device exclude each other: batches "
                "that are made on the device are not fetched"
            )
        own = vars(self)  # of a frozen class
        own["experimental_fetch_to_device"], own["experimental_replication_mode"] = fetch, mode
        own["experimental_place_dataset_on_device"], own["experimental_per_replica_buffer_size"] = place, size
        own["auto_shard_policy"] = policy


@final
@dataclass(frozen=True)
class InputContext:
    """The argument of the function of `distribute_datasets_from_function`.

    Args:
        num_input_pipelines: Number of input pipelines: of ranks, or of replicas with `PER_REPLICA`.
        input_pipeline_id: The number of this pipeline: the rank, or the replica's id with `PER_REPLICA`.
        num_replicas_in_sync: Number of replicas.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divide a global batch size by the number of replicas.

        Raises:
            ValueError: If it does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} is not divisible by the {self.num_replicas_in_sync} "
                "replicas; choose a multiple, or let experimental_distribute_dataset split uneven batches"
            )
        return size

    def __str__(self) -> str:
        return f"InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
