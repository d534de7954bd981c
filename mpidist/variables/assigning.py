"""How a variable is assigned: in replica context, in cross-replica context, and inside `update`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

import numpy as np

from mpidist.context_stack import CurrentStrategy
from mpidist.values import IndexedSlices
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.rules import VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Assignable", "require_no_effect", "store"]


class Assignable(ReadsAsArray, ABC):
    """An array that belongs to a strategy, and can be assigned, whole or in rows."""

    _strategy: CurrentStrategy
    _trainable: bool
    _synchronization: VariableSynchronization
    _aggregation: VariableAggregation

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy that was current when the variable was made."""
        return self._strategy

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change the variable."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are aggregated. On parameter servers there is one array alone."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values or copies are aggregated: of a variable on servers, the values of a worker's replicas."""
        return self._aggregation

    def _per_replica_error(self) -> ValueError:
        return ValueError(
            f"{self._what} takes one value for all replicas, and a PerReplica was assigned to it in cross-replica "
            "context: reduce the PerReplica first, as with strategy.reduce('mean', value), or assign each component "
            "inside strategy.run()"
        )

    @abstractmethod
    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        """Assign as the method of this name does. `ufunc` combines the old value and `value`; `None` replaces it."""

    @final
    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value, and return the variable.

        In `Strategy.run` the replicas' values are aggregated, and the call is collective, unless the aggregation is
        NONE or the synchronization ON_READ. Elsewhere the call is local. With NONE, replicas of one rank must assign
        the same bits, and the variable is written once; that is checked at their next collective call and at the end of
        `run`.

        On a parameter server the variable is changed later, and the call waits for no other worker. Where this worker
        has several replicas, all of them call it together in `run`: the server gets one change, of the aggregate, and
        with NONE the call is refused.

        Args:
            value: An array of the variable's shape and of the same kind of number (a float is not cast to an integer),
                or a number; of a distributed value, this rank's component. Outside of `run` a `PerReplica` is refused
                if the number of replicas was chosen.
            use_locking: Must be `False`: one thread at a time writes a variable, so there is nothing to lock.
            name: Must be `None`: there is no graph whose operations have names.
            read_value: `False` returns `None`.

        Raises:
            ValueError: If the shape or the kind of number differs, if an integer is too large for the dtype, or if a
                Python number or a mirrored value is assigned with aggregation SUM in `run`, which would add it once
                for every replica; if several replicas of a worker assign a variable on servers with NONE; or if
                `use_locking` or `name` is given.
            TypeError: If the value is neither an array nor a number.
            UnavailableError: If the variable's parameter server is lost.
            RuntimeError: If another strategy is current.
        """
        if use_locking or name is not None:
            require_no_effect("assign", use_locking, name)
        return self._assign("assign", value, None, read_value)

    @final
    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value, and return the variable. As `assign`; in `run` the deltas are aggregated."""
        if use_locking or name is not None:
            require_no_effect("assign_add", use_locking, name)
        return self._assign("assign_add", delta, np.add, read_value)

    @final
    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value, and return the variable. As `assign_add`."""
        if use_locking or name is not None:
            require_no_effect("assign_sub", use_locking, name)
        return self._assign("assign_sub", delta, np.subtract, read_value)

    @abstractmethod
    def _scatter(self, call: str, delta: Any) -> None:
        """Change rows as the method of this name does."""

    def _scattered(self, call: str, delta: Any, use_locking: bool, name: str | None) -> Self:
        require_no_effect(call, use_locking, name)
        self._scatter(call, delta)
        return self

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to some rows, and return the variable. Rows with the same index are all added.

        In `Strategy.run` the replicas' deltas are aggregated, as in `assign_add`, and the call is collective, unless
        the aggregation is NONE: every rank gathers the rows of all ranks, and changes its copy in rank order. MEAN
        divides the rows by the number of replicas first; ONLY_FIRST_REPLICA takes the rows of replica 0 alone.
        Elsewhere the call is local.

        Args:
            sparse_delta: k rows: values [k, ...] with the variable's dimensions but the first, and indices [k] from 0
                to the variable's length - 1. k may differ between ranks.
            use_locking: Must be `False`, as in `assign`.
            name: Must be `None`, as in `assign`.

        Raises:
            TypeError: If `sparse_delta` is no `IndexedSlices`.
            ValueError: If rows have another shape or kind of number, or an index is out of range; or if `use_locking`
                or `name` is given.
            NotImplementedError: If the synchronization is ON_READ.
            RuntimeError: If another strategy is current.
        """
        return self._scattered("scatter_add", sparse_delta, use_locking, name)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from some rows, and return the variable. As `scatter_add`."""
        return self._scattered("scatter_sub", sparse_delta, use_locking, name)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply some rows, and return the variable. As `scatter_add`."""
        return self._scattered("scatter_mul", sparse_delta, use_locking, name)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide some rows, and return the variable; integers are rounded down. As `scatter_add`."""
        return self._scattered("scatter_div", sparse_delta, use_locking, name)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows to the maxima of their old and the given numbers, and return the variable. As `scatter_add`.

        Raises:
            NotImplementedError: Also in `Strategy.run` with aggregation SUM or MEAN.
        """
        return self._scattered("scatter_max", sparse_delta, use_locking, name)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows to the minima of their old and the given numbers, and return the variable. As `scatter_max`."""
        return self._scattered("scatter_min", sparse_delta, use_locking, name)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows, and return the variable. Of rows with one index the last one is kept. As `scatter_max`."""
        return self._scattered("scatter_update", sparse_delta, use_locking, name)


def require_no_effect(call: str, use_locking: bool = False, name: str | None = None) -> None:
    """Refuse arguments of tf.distribute that have no effect here, unless they have their defaults."""
    if use_locking:
        raise ValueError(f"{call}: use_locking must be False: one thread at a time writes a variable; leave it out")
    if name is not None:
        raise ValueError(f"{call}: name must be None: there is no graph whose operations have names; leave it out")


def store(target: Any, array: Any, ufunc: np.ufunc | None) -> None:
    """Write an array. `ufunc` combines its old value and `array`; `None` replaces the old value."""
    if ufunc is None:
        target[...] = array
    else:
        ufunc(target, array, out=target)
