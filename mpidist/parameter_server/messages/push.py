"""What a worker pushes: changes of many arrays, and of rows of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.parameter_server.messages.locations import Location, RowsChange
from mpidist.transport.reduction import Reduction

__all__ = ["Push"]

Array = np.ndarray[Any, Any]

_SUM: Final = Reduction("sum")


@final
class Push(NamedTuple):
    """What a worker pushes at once.

    Attributes:
        locations: The arrays that are changed as a whole.
        values: A contiguous array for each of them, of the same shape and dtype.
        rows: What changes rows of arrays, also if it has no rows on this worker.
        how: A `Change`, or a rule.
        update: The same for people, and for other workers.
    """

    locations: Sequence[Location]
    values: Sequence[Array]
    rows: Sequence[RowsChange]
    how: Any
    update: str

    def has_form_of(self, other: Push) -> bool:
        """Whether another push changes the same arrays, in the same way."""
        rows, others = ([change.location for change in push.rows] for push in (self, other))
        return self.update == other.update and list(self.locations) == list(other.locations) and rows == others

    @classmethod
    def sum_of(cls, pushes: Sequence[Push]) -> Push:
        """Add what the replicas of a worker push, and join their rows, in their order.

        Raises:
            InvalidArgumentError: If replicas push for different arrays, or in different ways.
        """
        first = pushes[0]
        if not all(push.has_form_of(first) for push in pushes):
            raise InvalidArgumentError("push(): the replicas of a worker differ in the variables, or in the update")
        sums = [np.empty_like(value) for value in first.values]
        for at, total in enumerate(sums):
            _SUM.combine([push.values[at].reshape(-1) for push in pushes], total.reshape(-1))
        rows = [RowsChange.joined(changes) for changes in zip(*(push.rows for push in pushes), strict=True)]
        return first._replace(values=sums, rows=rows)
