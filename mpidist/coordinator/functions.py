"""Arguments of `schedule`: functions that all ranks have registered, and data sets of each worker.

No code goes from rank to rank. So a function is registered on all ranks, before workers serve::

    @coordinator.register("step")
    def step(iterator):
        features, targets = next(iterator)
        ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeVar, final

from mpidist.datasets.batches import require_batches
from mpidist.datasets.input_options import InputContext
from mpidist.nest.encoding import Handle

__all__ = [
    "PerWorkerDataset",
    "PerWorkerDatasets",
    "PerWorkerIterator",
    "function_named",
    "handle_of",
    "name_of",
    "register",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_registered: Final[dict[str, Callable[..., Any]]] = {}


def register(name: str) -> Callable[[Function], Function]:
    """Register a function under a name, so that a chief may schedule it. On all ranks, before workers serve.

    Args:
        name: A name that no other function has.

    Raises:
        TypeError: If the name is no text.
        ValueError: If another function has the name.
    """
    if not isinstance(name, str):
        raise TypeError(f'register takes a name: write @register("step"); got {name!r}')

    def keep(function: Function) -> Function:
        known = _registered.get(name)
        if known is not None and getattr(known, "__qualname__", None) != getattr(function, "__qualname__", ""):
            raise ValueError(f"a function {name!r} is registered already; choose another name")
        _registered[name] = function  # a module may be imported twice
        return function

    return keep


def name_of(function: Any) -> str:
    """Return the name of a registered function, or of a name the name."""
    for name, known in _registered.items():
        if known is function or name == function:
            return name
    shown = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"schedule takes a function that is registered on all ranks, got {shown}; write "
        '@mpidist.experimental.coordinator.register("a name") before it'
    )


def function_named(name: str) -> Callable[..., Any]:
    """Return a function, on the rank that calls it."""
    if name not in _registered:
        known = ", ".join(sorted(_registered)) or "none"
        raise LookupError(f"no function {name!r} is registered here (registered: {known}); register it on all ranks")
    return _registered[name]


@final
class PerWorkerDataset:
    """Data set `number` of each worker: an argument of functions that are scheduled. `iter` of it is one, too."""

    def __init__(self, number: int) -> None:
        self.handle: Handle = (number, -1)
        self._num_iterators = 0

    def __iter__(self) -> PerWorkerIterator:
        self._num_iterators += 1
        return PerWorkerIterator(self.handle[0], self._num_iterators - 1)

    def __repr__(self) -> str:
        return f"<PerWorkerDataset {self.handle[0]}>"


@final
class PerWorkerIterator:
    """Iterator `number` of each worker over a data set, given by its number: an argument of scheduled functions."""

    def __init__(self, dataset: int, number: int) -> None:
        self.handle: Handle = (dataset, number)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError("iterate over a data set of each worker in functions that are scheduled, not outside")

    def __repr__(self) -> str:
        return f"<PerWorkerIterator {self.handle[1]} of data set {self.handle[0]}>"


@final
class PerWorkerDatasets:
    """Data sets of one worker, each made at its first use by a function."""

    def __init__(self, context: InputContext) -> None:
        self._context = context
        self._sources: list[Any] = []
        self._made: dict[int, Any] = {}
        self._iterators: dict[Handle, Iterator[Any]] = {}

    def add(self, source: Any) -> PerWorkerDataset:
        """Add the source of a data set. All workers add the same in the same order."""
        if not callable(source):
            _require_dataset("create_per_worker_dataset() takes a data set, or a function that returns one", source)
        self._sources.append(source)
        return PerWorkerDataset(len(self._sources) - 1)

    def value_of(self, handle: Handle) -> Any:
        """Return this worker's data set or iterator."""
        number, iterator = handle
        if number >= len(self._sources):
            raise LookupError(
                f"this worker has {len(self._sources)} data sets, and a function needs number {number}: call "
                "create_per_worker_dataset(...) on all workers, before they serve"
            )
        if number not in self._made:
            self._made[number] = self._make(self._sources[number])
        if iterator < 0:
            return self._made[number]
        if handle not in self._iterators:
            self._iterators[handle] = iter(self._made[number])
        return self._iterators[handle]

    def _make(self, source: Any) -> Any:
        if not callable(source):
            return source
        takes_context = bool(inspect.signature(source).parameters)
        dataset = source(self._context) if takes_context else source()
        _require_dataset("the function of create_per_worker_dataset() must return a data set", dataset)
        return dataset


def _require_dataset(needed: str, dataset: Any) -> None:
    try:
        require_batches(dataset)
    except TypeError as error:
        raise TypeError(f"{needed}: {error}") from None


def handle_of(item: Any) -> Handle | None:
    """Return the handle of a per-worker data set or iterator; `None` for anything else."""
    return item.handle if isinstance(item, (PerWorkerDataset, PerWorkerIterator)) else None
