"""One rank of a job that `across_hosts.py` starts: it sums arrays over all hosts, and rank 0 prints what that took.

python -m contest.across mpi SIZES STEPS
python -m contest.across gloo SIZES STEPS RANK RANKS ADDRESS
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from record import parse_size

from contest.work import check_ends, check_pattern, write_number, write_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[[Any], object]

__all__ = ["main"]

_LINK: Final = "eth0"
# Two roundings of positive numbers. The sums of the others are exact, and so are those of `check_ends`.
_TOLERANCES: Final = {"mpidist bf16": 2.0**-7, "mpidist fp16": 2.0**-10}
_SENT_BYTES, _SENT_PACKETS = 8, 9  # columns of /proc/net/dev, after the name


class _Job:
    """All ranks, over one library."""

    rank: int
    size: int
    versions: dict[str, str]

    def ways(self) -> Iterator[tuple[str, Call]]:
        """Give each way its turn: its name, and what sums an array in place. Collective."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait for all ranks. Collective."""
        raise NotImplementedError

    def most(self, numbers: list[float]) -> list[float]:
        """Find the largest of all ranks, number by number. Collective."""
        raise NotImplementedError


class _Mpi(_Job):
    """Raw mpi4py, and mpidist."""

    def __init__(self) -> None:
        from mpi4py import MPI

        from contest.mpi_versions import mpi_versions

        self._comm, self._mpi = MPI.COMM_WORLD, MPI
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.versions = mpi_versions()

    def ways(self) -> Iterator[tuple[str, Call]]:
        from mpidist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context

        yield "raw", lambda array: self._comm.Allreduce(self._mpi.IN_PLACE, array)

        def reduce(array: Any, options: CommunicationOptions) -> None:
            context = get_replica_context()
            assert context is not None  # inside strategy.run
            context.all_reduce("SUM", array, options, out=array)

        of_ways = {
            "mpidist": CommunicationOptions(),
            "mpidist reproducible": CommunicationOptions(reproducible=True),
            "mpidist bf16": CommunicationOptions(compression="bf16"),
            "mpidist fp16": CommunicationOptions(compression="fp16"),
        }
        with MultiWorkerMirroredStrategy() as strategy:
            for way, options in of_ways.items():
                yield way, lambda array, options=options: strategy.run(reduce, (array, options))  # type: ignore[misc]

    def meet(self) -> None:
        self._comm.Barrier()

    def most(self, numbers: list[float]) -> list[float]:
        largest = np.array(numbers)
        self._comm.Allreduce(self._mpi.IN_PLACE, largest, self._mpi.MAX)
        return [float(one) for one in largest]


class _Gloo(_Job):
    """torch.distributed over gloo."""

    def __init__(self, rank: str, size: str, address: str) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self.rank, self.size = int(rank), int(size)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.size)
        self.versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}

    def ways(self) -> Iterator[tuple[str, Call]]:
        yield "gloo", lambda array: self._dist.all_reduce(self._torch.from_numpy(array))
        self._dist.barrier()
        self._dist.destroy_process_group()

    def meet(self) -> None:
        self._dist.barrier()

    def most(self, numbers: list[float]) -> list[float]:
        largest = self._torch.tensor(numbers, dtype=self._torch.float64)
        self._dist.all_reduce(largest, self._dist.ReduceOp.MAX)
        return [float(one) for one in largest]


def _sent() -> tuple[int, int]:
    """Read what this host has sent over its link: bytes with all headers, and packets."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, text = line.partition(":")
        if name.strip() == _LINK:
            numbers = text.split()
            return int(numbers[_SENT_BYTES]), int(numbers[_SENT_PACKETS])
    raise RuntimeError(f"this host has no {_LINK}")


def _measure(job: _Job, way: str, call: Call, text: str, steps: int) -> dict[str, Any]:
    """Take a step that does not count and whose whole result is checked, and some that do. Collective."""
    array = np.empty(parse_size(text) // 4, np.float32)
    write_pattern([array], job.rank)
    call(array)
    check_pattern([array], [array.shape], job.size, _TOLERANCES.get(way, 0.0))
    times = []
    job.meet()
    before = _sent()
    for number in range(1, steps + 1):
        write_number([array], number + job.rank)
        job.meet()
        start = perf_counter()
        call(array)
        times.append(perf_counter() - start)
        check_ends([array], [array.shape], job.size, number)
    job.meet()
    each = [(after - was) / steps for was, after in zip(before, _sent(), strict=True)]
    nbytes, packets, *seconds = job.most([*each, *times])
    return {"work": text, "bytes": array.nbytes, "seconds": seconds, "sent": nbytes, "packets": packets}


def _say(what: dict[str, Any]) -> None:
    # In one piece, for others write to the same file; `print` would write the end of the line alone.
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print. Collective."""
    kind, sizes, steps, *more = sys.argv[1:]
    job = _Gloo(*more) if kind == "gloo" else _Mpi()
    if job.rank == 0:
        _say({"versions": job.versions})
    for way, call in job.ways():
        for text in sizes.split(","):
            measured = _measure(job, way, call, text, int(steps))
            if job.rank == 0:
                _say({"way": way, **measured})


if __name__ == "__main__":
    main()
