"""What every kind of parameter server must offer to be measured, and the check that it adds and reads rightly."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
from ranks.way import Library, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ranks.work import Work

__all__ = ["Contestant", "mpi_versions", "place_parts"]

_ALONE_BYTES = 32 << 20  # a larger array is cut into a part for each server
_MESSAGE_BYTES = 64 << 10  # larger arrays are sent alone, smaller ones together


class Contestant(Library):
    """Workers, which are ranks 0, 1, ... of those that are measured, and servers behind them.

    Args:
        place: The number of this process, among workers and servers.
        workers: How many there are.
        servers: How many there are.

    Attributes:
        meet: The barrier of the workers; set before the first work.
    """

    def __init__(self, place: int, workers: int, servers: int) -> None:
        self.rank, self.size, self.servers = place, workers, servers
        self.versions: dict[str, str] = {}
        self.meet: Callable[[], object] = lambda: None

    @property
    def serves(self) -> bool:
        """Whether this process is a server."""
        return self.rank >= self.size

    def serve(self) -> None:
        """Serve until all workers are done. On servers."""
        raise NotImplementedError

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        """Make variables of zeros for a work.

        Returns:
            What adds 1 to all numbers, and returns when the servers have added; what returns all numbers.
        """
        raise NotImplementedError

    def numbers(self, pulled: Any) -> Sequence[Any]:
        """Return as NumPy arrays what the last pull has returned."""
        found: Sequence[Any] = pulled
        return found

    def more_ways(self, work: Work) -> dict[str, Way]:
        """List what else is timed beside push and pull."""
        return {}

    def close(self) -> None:
        """End the workers' part."""

    def ways(self, work: Work) -> dict[str, Way]:
        """Prepare a work on workers, see that every push of every worker counts, and list the ways. Collective."""
        push, pull = self.begin(work)
        for number in (1, 2):
            push()
            self.meet()
            _check(self.numbers(pull()), work, number * self.size)
            self.meet()

        def both() -> None:
            push()
            pull()

        def way(act: Callable[[], object]) -> Way:
            return Way([], lambda at: act(), "")

        return {"push": way(push), "pull": way(pull), "push, pull": way(both), **self.more_ways(work)}


def mpi_versions() -> dict[str, str]:
    """Return the versions of MPI and of what uses it."""
    import mpi4py  # TensorFlow's environment has none
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    mpi = f"{name} {'.'.join(map(str, version))}"
    return {"mpi": mpi, "mpi4py": mpi4py.__version__, "numpy": np.__version__, "python": platform.python_version()}


def _check(found: Sequence[Any], work: Work, wanted: int) -> None:
    number = sum(array.size for array in found)
    if 4 * number != work.nbytes:
        raise ArithmeticError(f"{number} numbers came back of {work.nbytes // 4}")
    for array in found:
        if (array != wanted).any():
            raise ArithmeticError(f"{wanted} was expected everywhere, and {array.min()} to {array.max()} came back")


def place_parts(work: Work, servers: int, together_bytes: int = _MESSAGE_BYTES) -> list[list[int]]:
    """Lay a work's numbers over servers as somebody does who knows the arrays: round robin; a large one is cut.

    Args:
        work: The work.
        servers: How many.
        together_bytes: Arrays up to this size go together, in one message for each server.

    Returns:
        The sizes of each server's messages, in numbers.
    """
    sizes = [int(np.prod(shape)) for shape in work.shapes]
    if len(sizes) == 1 and work.nbytes >= _ALONE_BYTES:
        return [[len(part)] for part in np.array_split(range(sizes[0]), servers)]
    placed: list[list[int]] = []
    for server in range(servers):
        own = sizes[server::servers]
        alone = [size for size in own if 4 * size > together_bytes]
        rest = sum(own) - sum(alone)
        placed.append([*alone, *([rest] if rest else [])])
    return placed
