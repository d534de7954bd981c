"""Kinds of leaves of a checkpoint's nests: how the state of each is read and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.operands import native_dtype
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.datasets.distributed_dataset import DistributedDataset
from mpidist.datasets.distributed_iterator import DistributedIterator
from mpidist.parameter_server.variable import ServerVariable, ShardedVariable
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.half import is_of_numpy
from mpidist.transport.text import value_text
from mpidist.values import PerReplica
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.rules import VariableAggregation
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import Variable

__all__ = ["Leaf", "Owner", "ReplicaLeaf", "State", "form_of", "is_alone", "leaf_of", "strategy_of"]

Array = np.ndarray[Any, Any]
State = Any  # a NumPy array, or what JSON can hold

_OF_SERVERS: Final = (ServerVariable, ShardedVariable)
_VARIABLES: Final = (Variable, *_OF_SERVERS)
_DATA: Final = (DistributedDataset, DistributedIterator)
_JSON: Final = (bool, int, float, str, type(None))


@final
class Owner(Enum):
    """Whose state a leaf is."""

    ALL = "all"  # one state, which all ranks share
    RANK = "rank"  # each rank's, where ranks differ
    REPLICA = "replica"  # each replica's


class Leaf(ABC):
    """One leaf of a checkpoint.

    `name` is the leaf's in the checkpoint, `weights['kernel']`, and `label` the one for people. A state must be like
    `form`, `float32[3, 2]`; `dtype` and `shape` are those of an array. `states` copies the state to other memory if
    `copies_state`. Refuses dtypes that a file cannot hold, and the kinds of `refused_kinds`.
    """

    owner = Owner.RANK
    copies_state = False
    refused_kinds = "US"

    def __init__(self, name: str, value: Any, like: Any = None, label: str = "") -> None:
        like = value if like is None else like  # what states are like
        self.name, self.label = name, label or name
        self._value = value
        self.form = form_of(like)
        is_array = hasattr(like, "shape") and not _is_plain(like)
        self.dtype: np.dtype[Any] | None = native_dtype(np.dtype(like.dtype)) if is_array else None
        self.shape: tuple[int, ...] = tuple(like.shape) if is_array else ()
        if self.dtype is not None:
            _require_numbers(self.label, self.dtype, self.refused_kinds)

    @abstractmethod
    def states(self) -> list[State]:
        """Return the state; of a replica's leaf, that of each replica of this rank. May be a view of the leaf."""

    def require_fitting(self, state: State) -> None:  # noqa: B027
        """Refuse by `ValueError` a state of the leaf's form that the leaf cannot take. Before anything is restored."""

    def memory(self) -> Array | None:
        """Return the bytes of an array that are the leaf's state, to be written; `None` if `restore` has to do it."""
        return None

    @abstractmethod
    def restore(self, state: State) -> Any:
        """Put a state back that fits, with all ranks. Returns what takes the leaf's place in its nest."""


@final
class _MirroredLeaf(Leaf):
    """A variable whose copies are equal, or which lives on servers, or belongs to this rank alone."""

    def __init__(self, name: str, variable: Any, owner: Owner) -> None:
        super().__init__(name, variable, label=f"{name} (variable {variable.name!r})")
        self.owner = owner
        self._is_on_servers = isinstance(variable, _OF_SERVERS)
        self.copies_state = self._is_on_servers or arrays.is_device(variable.local_value())

    def states(self) -> list[State]:
        return [self._value.numpy() if self._is_on_servers else _to_host(self._value.local_value())]

    def memory(self) -> Array | None:
        return _memory_of(self._value.memory()) if isinstance(self._value, MirroredVariable) else None

    def restore(self, state: State) -> Any:
        writes = not self._is_on_servers or self._value.strategy.is_chief
        return self._value.assign(state) if writes else self._value


@final
class ReplicaLeaf(Leaf):
    """A variable whose copies may differ."""

    owner = Owner.REPLICA

    def __init__(self, name: str, variable: SyncOnReadVariable, strategy: Any) -> None:
        super().__init__(name, variable)
        self._strategy = strategy
        self.copies_state = any(map(arrays.is_device, variable.values))

    def states(self) -> list[State]:
        """See `Leaf`."""
        return [_to_host(value) for value in self._value.values]

    def restore(self, state: State) -> Any:
        """See `Leaf`."""
        return self._value.assign(state)

    def restore_replicas(self, states: Sequence[State]) -> None:
        """Put back the state of each replica of this rank."""
        chosen = parts_of(self._strategy).replicas.tree is not None
        self._strategy.run(self._value.assign, args=(PerReplica(tuple(states)) if chosen else states[0],))

    def join(self, states: Sequence[State]) -> State:
        """Return one state for the states of all replicas that saved them."""
        aggregation = self._value.aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name} was saved by {len(states)} replicas, and there are "
                f"{self._strategy.num_replicas_in_sync}: a variable with aggregation NONE has no value for another "
                "number of replicas. Start as many, or choose SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return states[0]
        dtype = states[0].dtype
        is_small = dtype.itemsize <= 2 and dtype.kind not in "biu"  # float16, bfloat16, float8
        with np.errstate(over="ignore"):
            total = np.sum(states, axis=0, dtype=np.float32 if is_small else dtype)  # as `all_reduce` adds
            return np.asarray(total if aggregation is VariableAggregation.SUM else total / len(states)).astype(dtype)


@final
class _ArrayLeaf(Leaf):
    """An array of any library, or a number of NumPy: written in place where the library lets it be."""

    refused_kinds = "USM"

    def __init__(self, name: str, value: Any) -> None:
        self._library = library_of(value)
        native = self._library.to_native(value)
        super().__init__(name, value, native)
        self.copies_state = arrays.is_device(native)

    def states(self) -> list[State]:
        return [_to_host(self._library.to_native(self._value))]

    def memory(self) -> Array | None:
        return _memory_of(self._library.to_target(self._value))

    def restore(self, state: State) -> Any:
        target = self._library.to_target(self._value)
        is_device = arrays.is_device(self._library.to_native(self._value))
        state = arrays.to_device(state) if is_device else state
        if target is None or not (is_device or target.flags.writeable):
            return self._library.from_native(state, self._value)
        target[...] = state
        arrays.wait_for_writes([target])
        return self._value


@final
class _PlainLeaf(Leaf):
    """A number of Python or NumPy, a text, or `None`: one may be restored to another."""

    def states(self) -> list[State]:
        return [_of_python(self._value)]

    def restore(self, state: State) -> Any:
        is_same_kind = isinstance(self._value, np.generic) and type(state) is type(_of_python(self._value))
        return type(self._value)(state) if is_same_kind else state


@final
class _GeneratorLeaf(Leaf):
    """A random number generator of NumPy."""

    def states(self) -> list[State]:
        return [_with_lists(self._value.bit_generator.state)]

    def restore(self, state: State) -> Any:
        source = self._value.bit_generator
        source.state = _with_arrays(state, source.state)
        return self._value


@final
class _PositionLeaf(Leaf):
    """The position in a distributed data set, or in one pass over it: equal on all ranks, which step together."""

    owner = Owner.ALL

    def __init__(self, name: str, dataset: DistributedDataset | DistributedIterator, strategy: CurrentStrategy) -> None:
        if not parts_of(strategy).peers.is_in_lock_step:
            raise ValueError(
                f"{name} is a data set of {strategy}, whose workers have no common position in it: save the "
                "position of each worker"
            )
        super().__init__(name, dataset, dataset.state_dict())

    def states(self) -> list[State]:
        return [self._value.state_dict()]

    def require_fitting(self, state: State) -> None:
        try:
            self._value.require_fitting(state)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def restore(self, state: State) -> Any:
        self._value.load_state_dict(state)
        return self._value


def strategy_of(value: Any) -> CurrentStrategy | None:
    """Return the strategy of a variable or a data set; `None` of other values."""
    return value.strategy if isinstance(value, (*_VARIABLES, *_DATA)) else None


def is_alone(strategy: CurrentStrategy) -> bool:
    """Whether a strategy has this rank alone, so that its variables are this rank's."""
    peers = parts_of(strategy).peers
    return bool(peers.is_in_lock_step and peers.topology.size == 1)


def leaf_of(name: str, value: Any, strategy: CurrentStrategy) -> Leaf:
    """Find the kind of a leaf; refuse unsupported values, and variables of another strategy."""
    own, is_variable = strategy_of(value), isinstance(value, _VARIABLES)
    if own is not None and own is not strategy:
        if is_variable and is_alone(own):
            return _MirroredLeaf(name, value, Owner.RANK)
        kind = "variable" if is_variable else "data set"
        raise ValueError(f"{name} is a {kind} of {own}, and the checkpoint is of {strategy}")
    if isinstance(value, SyncOnReadVariable):
        return ReplicaLeaf(name, value, strategy)
    if is_variable:
        return _MirroredLeaf(name, value, Owner.ALL)
    if isinstance(value, _DATA):
        return _PositionLeaf(name, value, strategy)
    if isinstance(value, np.random.Generator):
        return _GeneratorLeaf(name, value, value.bit_generator.state)
    if _is_plain(value):
        return _PlainLeaf(name, value)
    try:
        return _ArrayLeaf(name, value)
    except TypeError as error:
        raise TypeError(
            f"{name}: a checkpoint holds variables, arrays, numbers, texts, distributed data sets and random number "
            f"generators of NumPy, in nests, and got {value_text(value)}: {error}"
        ) from None


def _require_numbers(label: str, dtype: np.dtype[Any], refused_kinds: str) -> None:
    is_raw = dtype.kind == "V" and is_of_numpy(dtype)
    if dtype.hasobject or dtype.kind in refused_kinds or is_raw:
        advice = "a checkpoint holds arrays of numbers; save texts in a list"
        raise TypeError(f"{label} is an array of dtype {dtype}: {advice}")


def form_of(value: Any) -> str:
    """Describe the form of a state: dtype and shape of an array, the kind of a generator; a position in data."""
    if hasattr(value, "shape") and not _is_plain(value):
        return f"{np.dtype(value.dtype).name}{list(value.shape)}"
    if isinstance(value, dict):
        return f"generator {value['bit_generator']}" if "bit_generator" in value else "position in data"
    return "number or text"


def _memory_of(array: Any) -> Array | None:
    """Return the bytes of an array, if they are in the host's memory as they are in files, and may be written."""
    is_host = isinstance(array, np.ndarray) and array.dtype.isnative
    return arrays.bytes_of(array) if is_host and array.flags.c_contiguous and array.flags.writeable else None


def _to_host(array: Any) -> Array:
    host = arrays.on_host(array)
    return host.astype(native_dtype(host.dtype), copy=False)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a number, text or `None`, all of its bits."""
    is_number = isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    return is_number or isinstance(value, _JSON)


def _of_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _with_lists(state: Any) -> Any:
    """Write the state of a generator as JSON can hold it."""
    if isinstance(state, dict):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def _with_arrays(state: Any, like: Any) -> Any:
    """Undo `_with_lists`, with the dtypes of another state."""
    if isinstance(like, dict):
        return {key: _with_arrays(state[key], value) for key, value in like.items()}
    return np.array(state, like.dtype) if isinstance(like, np.ndarray) else state
