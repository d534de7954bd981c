"""A data set over all ranks, which can be iterated repeatedly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, final

from mpidist.context_stack import CurrentStrategy
from mpidist.datasets.batches import BatchSource, GlobalBatches, OwnBatches, num_batches, require_batches
from mpidist.datasets.dealt_batches import deal_out, fields_of_files
from mpidist.datasets.distributed_iterator import DistributedIterator
from mpidist.datasets.files import Files
from mpidist.datasets.input_options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from mpidist.datasets.parts import element_spec_of
from mpidist.datasets.position import Progress
from mpidist.strategy_parts import StrategyParts

__all__ = ["DistributedDataset"]

logger = logging.getLogger(__name__)

_DEPENDS_ON_RANKS: Final = (
    "distribute_datasets_from_function makes one input pipeline for each rank, from which the rank's replicas take "
    "batches in turn. So which batches a replica gets, and the results, depend on the number of ranks. To give each of "
    "the %d replicas a pipeline of its own, pass InputOptions(experimental_replication_mode='per_replica')"
)


@final
class DistributedDataset:
    """This rank's batches. Iterating is collective: one small round over all ranks at each step.

    All ranks make the same number of steps. If ranks make their own batches, a rank whose batches have ended gets empty
    ones, of length 0 on axis 0, until those of all ranks have. `strategy.reduce("mean", x, axis=0)` weighs them right.
    If the number of replicas was chosen, a step gives a nest of `PerReplica` values, with a batch for each replica of
    the rank.

    Passes are numbered: `epoch`. A `checkpoint.Checkpoint` takes a data set as one of its items: it holds the position,
    and the first pass after a restore goes on there, also on another number of ranks.

    Args:
        strategy_parts: The strategy's ranks, replicas and devices.
        source: The batches, and which parts of them are those of this rank's replicas.
        options: The memory that batches are put into, and how far to read ahead.
    """

    def __init__(self, strategy_parts: StrategyParts, source: BatchSource, options: InputOptions) -> None:
        self._strategy_parts = strategy_parts
        self._source = source
        fetch, is_placed = options.experimental_fetch_to_device, options.experimental_place_dataset_on_device
        self._fetches_to_device = (
            fetch is not False
            and not is_placed
            and any(device.is_gpu and (fetch or device.is_named) for device in strategy_parts.replicas.devices)
        )
        self._num_ahead = options.experimental_per_replica_buffer_size - 1
        self._number = strategy_parts.next_dataset_number()
        self._progress = Progress(source)
        self._has_warned = False

    @classmethod
    def from_batches(
        cls, strategy_parts: StrategyParts, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Cut every batch into contiguous parts, one per replica; deal out batches of `Files`. Local; of files, not.

        Raises:
            NotImplementedError: With `InputReplicationMode.PER_REPLICA`.
            TypeError: If the data set is no re-iterable of batches.
            ValueError: If the batches cannot be dealt out as the `AutoShardPolicy` says. Of files, on every rank.
            InvalidArgumentError: If the ranks have other files. On every rank.
        """
        options = _options(options)
        policy = options.auto_shard_policy
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function; a data set of global "
                "batches is cut for the replicas anyway"
            )
        if isinstance(dataset, Files):
            source = _dealt_out(strategy_parts, "experimental_distribute_dataset", lambda: dataset, policy)
            return cls(strategy_parts, source, options)
        if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
            raise ValueError(
                f"auto_shard_policy={policy} of global batches: each replica takes its part of every batch. For "
                "batches of files make the data set a mpidist.Files(names, read); for whole batches call "
                "distribute_datasets_from_function"
            )
        require_batches(dataset)
        compares_numbers = strategy_parts.group.settings.check and strategy_parts.group.topology.size > 1
        return cls(strategy_parts, GlobalBatches(dataset, strategy_parts.replicas, compares_numbers), options)

    @classmethod
    def from_function(
        cls,
        strategy_parts: StrategyParts,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None,
    ) -> DistributedDataset:
        """Let every rank, or every replica, make batches of its own; or deal out what one pipeline makes. Collective.

        Raises:
            TypeError: If the function returned no re-iterable of batches on some rank. On every rank.
            ValueError: If the batches cannot be dealt out as the `AutoShardPolicy` says. On every rank.
            Exception: What the function raised on the lowest rank where it raised. On every rank.
        """
        call, source = "distribute_datasets_from_function", None
        policy = AutoShardPolicy.AUTO if not isinstance(options, InputOptions) else options.auto_shard_policy
        if policy in (AutoShardPolicy.FILE, AutoShardPolicy.DATA):
            whole = InputContext(1, 0, strategy_parts.replicas.total)
            source = _dealt_out(strategy_parts, call, partial(_called, call, dataset_fn, whole), policy)
        else:
            with strategy_parts.raise_together(call):
                source = _own_batches(strategy_parts, partial(_called, call, dataset_fn), options)
        return cls(strategy_parts, source, _options(options))

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(
            self._strategy_parts, self._number, self._source, self._progress, self._num_ahead, self._fetches_to_device
        )

    def __len__(self) -> int:
        """Return the number of this rank's batches, or of steps until all replicas of the rank have had theirs. Local.

        Of global batches that is the number of steps of a pass.

        Raises:
            TypeError: If the iterable of batches has no length.
        """
        return num_batches(self._source.batches)

    def __bool__(self) -> bool:
        return True  # else Python would call `__len__`, which may raise

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy whose ranks step together."""
        return self._strategy_parts.strategy

    @property
    def epoch(self) -> int:
        """The number of the pass, from 0: of the one that goes on, or of the next one when that is over. Local.

        A pass that the program has left, by `break` or because of an error, goes on until the next one begins. A pass
        inside another one does not count once it is over, or its iterator is dropped, as by `next(iter(dataset))`.
        """
        epoch: int = self.state_dict()["epoch"]
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass that has made the last step, as JSON can hold it. Local, equal on all ranks.

        After a pass inside another one, whose iterator the program still has, it is the position in that one; a warning
        says so once.

        Of global batches it is the number of samples that all ranks have had together; of batches that are dealt out in
        turn, of batches; if ranks have files, or make batches, of their own, the number of steps. What a thread has
        read ahead does not count.
        """
        state = self._progress.state_at(self._progress.position)
        if self._progress.is_back and self._strategy_parts.topology.rank == 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "mpidist: the position in data set %d is %s, that of a pass whose iterator the program still has, and "
                "not that of a later pass inside it; if that pass is over, drop its iterator, as by del",
                self._number,
                state,
            )
        return state

    def require_fitting(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from which `load_state_dict` could not go on. Local.

        Raises:
            ValueError: If it is no position in such a data set. If it is in the middle of a pass, and the batches have
                another order: another `seed`, `num_samples` or `num_files`, if the iterable of batches has these
                attributes; or, of batches that ranks or replicas have for themselves, another number of them.
        """
        self._progress.require_fitting(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at a position that `state_dict` returned, equal on all ranks. Local.

        Batches are skipped when the pass begins: by `iter_from(epoch, num_samples)`, if the iterable of batches has
        this method, as `Batches` has; else they are read, and not used.

        Raises:
            ValueError: As `require_fitting` does. Then nothing is changed.
        """
        self._progress.restore(state)

    @property
    def element_spec(self) -> Any:
        """The form of a batch, as one replica gets it: a nest with an `ArraySpec` for each array. Local.

        The `element_spec` of the iterable of batches, if it has that attribute; else the form of the first batch, for
        which a pass is begun: if the iterable counts passes, read this property on all ranks.

        Raises:
            ValueError: If there is no batch.
        """
        return element_spec_of(self._source.batches, self._source.parts_of)


def _dealt_out(
    strategy_parts: StrategyParts, call: str, make: Callable[[], Iterable[Any]], policy: AutoShardPolicy
) -> BatchSource:
    """Deal out what a function makes, the same on every rank. Collective."""
    topology, replicas = strategy_parts.topology, strategy_parts.replicas
    ids_here, total = replicas.ids_here, replicas.total
    if strategy_parts.service is not None:  # workers of parameter servers: each has as many replicas, numbered from 0
        ids_here = range(topology.rank * total, (topology.rank + 1) * total)
        total *= topology.size
    with strategy_parts.raise_together(call):
        batches = make()
        fields = fields_of_files(batches, policy) if isinstance(batches, Files) else {"policy": str(policy)}
    strategy_parts.agree(call, fields)
    with strategy_parts.raise_together(call):
        return deal_out(batches, policy, ids_here, total, topology.rank == 0)
    raise AssertionError  # `raise_together` keeps no exception back


def _own_batches(
    strategy_parts: StrategyParts, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None
) -> OwnBatches:
    """Call a function that makes batches: once for each replica of this rank, or once for the rank."""
    replicas, topology = strategy_parts.replicas, strategy_parts.topology
    contexts, num_per_step = [InputContext(topology.size, topology.rank, replicas.total)], replicas.num_here
    if replicas.tree is not None:
        if _options(options).experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            ids_here, num_per_step = replicas.ids_here, 1
            contexts = [InputContext(replicas.total, replica_id, replicas.total) for replica_id in ids_here]
        elif topology.rank == 0:
            logger.warning(_DEPENDS_ON_RANKS, replicas.total)
    pipelines = [dataset_fn(context) for context in contexts]
    for pipeline in pipelines:
        require_batches(pipeline)
    order_fields = {"pipelines": contexts[0].num_input_pipelines, "replicas": replicas.total}
    return OwnBatches(pipelines, num_per_step, order_fields)


def _called(call: str, dataset_fn: Any, context: InputContext) -> Any:
    """Call the function that makes batches, or say that it is none."""
    if not callable(dataset_fn):
        raise TypeError(
            f"{call} takes a function that gets an InputContext and returns batches, got {type(dataset_fn).__name__}; "
            "a data set of global batches is for experimental_distribute_dataset"
        )
    return dataset_fn(context)


def _options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions or None, got {type(options).__name__}")
    return options if options is not None else InputOptions()
