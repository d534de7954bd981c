"""A data set over all ranks, which can be iterated repeatedly."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

from mpidist.context_stack import CurrentStrategy
from mpidist.datasets.batches import BatchSource, GlobalBatches, WholeBatches, order_fields_of, require_batches
from mpidist.datasets.distributed_iterator import DistributedIterator
from mpidist.datasets.files import Files
from mpidist.datasets.input_options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from mpidist.datasets.position import Progress
from mpidist.strategy_parts import StrategyParts

__all__ = ["DistributedDataset"]

logger = logging.getLogger(__name__)

_DEPENDS_ON_RANKS: Final = (
    "distribute_datasets_from_function makes one input pipeline for each rank, from which the rank's replicas take "
    "batches in turn. So which batches a replica gets, and the results, depend on the number of ranks. To give each of "
    "the %d replicas a pipeline of its own, pass InputOptions(experimental_replication_mode='per_replica')"
)
_SAME_FILES: Final = (
    "Give all ranks the same files in the same order, and the same options: glob and os.listdir find files in any "
    "order, so sort the names"
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
    """

    def __init__(self, strategy_parts: StrategyParts, source: BatchSource, options: InputOptions) -> None:
        self._strategy_parts, self._source, self._options = strategy_parts, source, options
        self._number = next(strategy_parts.dataset_numbers)
        self._progress = Progress(source)
        self._has_warned = False

    @classmethod
    def from_batches(
        cls, strategy_parts: StrategyParts, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Cut every batch into contiguous parts, one per replica; deal out batches of `Files`. Local; of files, not.

        Raises what `Strategy.experimental_distribute_dataset` does; `NotImplementedError` with `PER_REPLICA`.
        """
        options = _options(options)
        policy = options.auto_shard_policy
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function; a data set of global "
                "batches is cut for the replicas anyway"
            )
        if isinstance(dataset, Files):
            source = _dealt_out(strategy_parts, "experimental_distribute_dataset", dataset, policy)
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
        """Make a data set of every rank's or replica's own batches; or deal out those of one pipeline. Collective.

        Raises what `Strategy.distribute_datasets_from_function` does.
        """
        call = "distribute_datasets_from_function"
        policy = options.auto_shard_policy if isinstance(options, InputOptions) else AutoShardPolicy.AUTO
        is_dealt_out = policy in (AutoShardPolicy.FILE, AutoShardPolicy.DATA)
        with strategy_parts.raise_together(call):
            if not callable(dataset_fn):
                raise TypeError(
                    f"{call} takes a function that gets an InputContext and returns batches, got "
                    f"{type(dataset_fn).__name__}; a data set of global batches is for experimental_distribute_dataset"
                )
            whole = InputContext(1, 0, strategy_parts.replicas.total)
            made: Any = dataset_fn(whole) if is_dealt_out else _own_batches(strategy_parts, dataset_fn, options)
        source = _dealt_out(strategy_parts, call, made, policy) if is_dealt_out else made
        return cls(strategy_parts, source, _options(options))

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._strategy_parts, self._number, self._progress, self._options)

    def __len__(self) -> int:
        """Return the number of this rank's batches, or of steps until all replicas of the rank have had theirs. Local.

        Of global batches that is the number of steps of a pass.

        Raises:
            TypeError: If the iterable of batches has no length.
        """
        return len(self._source)

    def __bool__(self) -> bool:
        return True  # else Python would call `__len__`, which may raise

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy whose ranks step together."""
        return self._strategy_parts.strategy

    @property
    def epoch(self) -> int:
        """The number of the pass, from 0: of the current one, or of the next one once that is over. Local.

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
        """Refuse a state from which `load_state_dict` could not continue. Local.

        Raises:
            ValueError: If it is no position in such a data set. If it is in the middle of a pass, and the batches have
                another order: another `seed`, `num_samples` or `num_files`, if the iterable of batches has these
                attributes; or, of batches that ranks or replicas have for themselves, another number of them.
        """
        self._progress.require_fitting(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next pass at a position that `state_dict` returned, equal on all ranks. Local.

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
        return self._source.element_spec


def _dealt_out(strategy_parts: StrategyParts, call: str, batches: Any, policy: AutoShardPolicy) -> BatchSource:
    """Deal out batches, the same on every rank, to replicas by a policy. Collective."""
    topology, replicas = strategy_parts.topology, strategy_parts.replicas
    ids_here, total = replicas.ids_here, replicas.total
    if not strategy_parts.peers.is_in_lock_step:  # each worker has as many replicas, numbered from 0
        ids_here = range(topology.rank * total, (topology.rank + 1) * total)
        total *= topology.size
    with strategy_parts.raise_together(call):  # so ranks that make other calls get no advice about files
        order = {name: str(number) for name, number in order_fields_of(batches, "batch_size").items()}
        fields = _fields_of_files(batches, policy) if isinstance(batches, Files) else {"policy": str(policy), **order}
    strategy_parts.agree(call, fields)
    with strategy_parts.raise_together(call):
        require_batches(batches)
        if isinstance(batches, Files):
            policy = _policy_of_files(batches, policy, total, topology.rank == 0)
        if policy is AutoShardPolicy.FILE:
            return _whole_files(batches, ids_here, total)
        if policy is AutoShardPolicy.DATA:
            return WholeBatches([batches], total, order_fields_of(batches, "batch_size"), ids_here)
        return WholeBatches([batches] * len(ids_here), 1, order_fields_of(batches, "batch_size"))
    raise AssertionError  # `raise_together` keeps no exception back


def _policy_of_files(files: Files, policy: AutoShardPolicy, num_replicas: int, is_first: bool) -> AutoShardPolicy:
    """Return the policy that `AUTO` means; refuse to deal out no file. `is_first`: whether this rank writes logs."""
    if not files.num_files:
        raise ValueError("this data set has no files: look for a wrong folder or pattern")
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if files.num_files >= num_replicas:
        return AutoShardPolicy.FILE
    if is_first:
        logger.info(
            "AutoShardPolicy.AUTO takes DATA, as there are %d files for %d replicas: every rank reads all files, and "
            "replicas take batches in turn",
            files.num_files,
            num_replicas,
        )
    return AutoShardPolicy.DATA


def _whole_files(batches: Any, ids_here: range, num_replicas: int) -> WholeBatches:
    if not isinstance(batches, Files):
        raise ValueError(
            f"AutoShardPolicy.FILE deals out files, and this data set, a {type(batches).__name__}, does not list "
            "its files; make it a mpidist.Files(names, read), or take AutoShardPolicy.DATA"
        )
    if batches.num_files < num_replicas:
        raise ValueError(
            f"AutoShardPolicy.FILE gives each of the {num_replicas} replicas whole files, and there are "
            f"{batches.num_files}; take AutoShardPolicy.DATA, or AUTO, which then does, or cut the data into more files"
        )
    pipelines = [batches.shard(num_replicas, replica_id) for replica_id in ids_here]
    return WholeBatches(pipelines, 1, {"pipelines": num_replicas, "replicas": num_replicas, **order_fields_of(batches)})


def _fields_of_files(files: Files, policy: AutoShardPolicy) -> dict[str, str]:
    """Describe what must be equal on all ranks in files that are dealt out, by name."""
    names = [str(name) for name in files.names]
    shown = f": {names[0]} to {names[-1]}" if names else ""
    return {
        "files": f"{len(names)}{shown}",
        "checksum of their names": f"{zlib.crc32(chr(0).join(names).encode(errors='surrogatepass')):08x}",
        "seed": str(files.seed),
        "policy": str(policy),
        "advice": _SAME_FILES,
    }


def _own_batches(
    strategy_parts: StrategyParts, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None
) -> WholeBatches:
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
    return WholeBatches(pipelines, num_per_step, order_fields)


def _options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions or None, got {type(options).__name__}")
    return options if options is not None else InputOptions()
