"""Exchange of ranks before they form a group: settings, versions, costs, and which ranks share memory."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from mpidist.errors import DeadlineExceededError, TopologyError
from mpidist.transport.costs.cost_file import TuningKey, load_tuned
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.failures import job_abort, open_groups
from mpidist.transport.mpi.child_process import (
    INHERITS_FROM_RANK,
    launcher_or_parent,
    mark_rank,
    require_no_child,
    require_variables,
)
from mpidist.transport.mpi.launch import check_launch
from mpidist.transport.mpi.library import (
    Intracomm,
    command_line,
    load_mpi,
    numbers_in_world,
    ranks_in_world,
    ranks_of_node,
)
from mpidist.transport.mpi.shared_files import mapped_mpi_files, unlink_files_of_all
from mpidist.transport.settings import Settings, unknown_settings
from mpidist.transport.stacks import places_text
from mpidist.transport.text import count_text, group_ranks, name_ranks
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import poll_or_keep

__all__ = ["agreed_cost_model", "await_ranks", "discover", "shared_cache"]

logger = logging.getLogger("mpidist.transport")

_warned: Final[set[str]] = set()
_SET: Final = "set it where the job is started, and make the launcher pass it on to all ranks"
_START: Final = "start all ranks in one environment of Python"
_PROCESSORS: Final = Path("/sys/devices/system/cpu")


def await_ranks(comm: Intracomm | None) -> Intracomm:
    """Wait until all ranks come to build a group, and return them (`None`: all ranks of the job). Collective.

    MPI is initialized, unless the program has done so, and a failure of this rank's program ends the job from now on.

    Raises:
        TypeError: If `comm` is no intra-communicator of mpi4py.
        UnavailableError: If there is no MPI.
        TopologyError: If this process is a child of a rank, or one of many worlds of one rank.
        RuntimeError: If a rank serves a strategy that this rank uses, or the program has not started MPI or ended it.
    """
    require_no_child(os.environ)
    mpi = load_mpi()
    if mpi.Is_finalized():
        raise RuntimeError(
            "a new strategy after MPI.Finalize(): MPI starts once in a process; leave ending MPI to mpidist"
        )
    mark_rank(os.environ)
    world: Intracomm = mpi.COMM_WORLD
    version = mpi.Get_library_version()
    check_launch(os.environ, world.Get_size(), version, command_line(), INHERITS_FROM_RANK)
    if world.Get_size() == 1:
        require_variables(os.environ)
    ranks: Intracomm = world if comm is None else comm
    is_usable = isinstance(ranks, mpi.Intracomm) and ranks != mpi.COMM_NULL
    if not is_usable:
        raise TypeError(f"comm must be an intra-communicator of mpi4py, got {ranks!r}")
    settings = Settings.or_default(os.environ)  # `discover` raises the error of an invalid one, on all ranks
    settings.apply_log_level()
    job_abort.install_job_abort(world, settings)
    open_groups.require_unused("a new strategy", ranks_in_world(ranks))
    _wait_for_all(ranks, settings)
    return ranks


def _wait_for_all(comm: Intracomm, settings: Settings) -> None:
    """Wait until all ranks build a group, at most `MPIDIST_TIMEOUT_SECONDS`. Collective."""
    open_groups.require_no_build_failure()
    timeout, stall = settings.timeout_seconds, settings.stall_seconds
    start = time.monotonic()
    warn_at = start + stall if stall else math.inf
    mark = socket.socket(socket.AF_UNIX)  # of the rank that speaks for its node

    def check_peers() -> None:
        nonlocal warn_at
        now = time.monotonic()
        text = f"building a strategy on rank {comm.rank} has waited {now - start:.0f} s, and not all {comm.size} ranks"
        if timeout and now - start >= timeout:
            open_groups.unbuilt.append("not all ranks came to build a strategy")
            raise DeadlineExceededError(
                f"{text} came to build it{_places_here()}. Every rank must build the same strategies in the same "
                "order; see which rank's program has ended, or does not come this far"
            )
        if now >= warn_at:
            warn_at = math.inf
            if _is_first_to_bind(mark, comm):
                logger.warning("mpidist: %s have come to build it%s", text, _places_here())

    with mark:
        try:
            for _ in range(2):  # a rank that arrives after others gave up completes the first barrier, not the second
                request = comm.Ibarrier()
                poll_or_keep(request.Test, check_peers, (request,))
        except (DeadlineExceededError, SystemExit, load_mpi().Exception):  # an exit builds no other one
            raise
        except BaseException as error:  # Ctrl-C, for example: the next strategy would join the barrier of this one
            open_groups.unbuilt.append(f"building a strategy was interrupted by {type(error).__name__}")
            raise


def _is_first_to_bind(mark: socket.socket, comm: Intracomm) -> bool:
    """Whether this is the first rank of its node to call: any rank may be missing, and the ranks share nothing yet.

    The ranks of a node come from one process of the launcher, after which the address is named, also if a shell starts
    each of them. It is no file, and free again when the socket is closed.
    """
    launcher = launcher_or_parent()
    try:
        mark.bind(f"\0mpidist: rank {min(ranks_in_world(comm))} of launcher {launcher} and others build a strategy")
    except OSError:
        return False
    return True


def _places_here() -> str:
    return places_text(launcher_or_parent())


@final
@dataclass(frozen=True)
class _Report:
    """Report of a rank to the others before they form a group.

    Attributes:
        error: Error of the rank's settings, or `None`.
        first_here: The first rank with which it shares memory.
        token: A random name for the group; that of the first rank counts.
        mpi_files: The files in which MPI shares memory with the rank.
        cache: A name for the last-level cache of its processors, or "".
    """

    error: str | None
    variables: Mapping[str, str]
    versions: Mapping[str, str]
    first_here: int
    hostname: str
    token: str
    mpi_files: frozenset[tuple[str, int]]
    cache: str

    @classmethod
    def own(cls, error: str | None, first_here: int) -> _Report:
        """Describe this rank."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("MPIDIST_")}
        versions = {"Python": sys.version.split()[0], "NumPy": np.__version__}
        hostname, token = socket.gethostname(), secrets.token_hex(4)
        return cls(error, variables, versions, first_here, hostname, token, mapped_mpi_files(), shared_cache())


def _require_equal_settings(everyone: Sequence[_Report]) -> None:
    """Check that settings and versions are equal on all ranks. Local."""
    for rank, report in enumerate(everyone):
        if report.error:
            raise ValueError(f"rank {rank}: {report.error}")
    variables, versions = [report.variables for report in everyone], [report.versions for report in everyone]
    for what, of_rank, advice in (("environment variable", variables, _SET), ("version of", versions, _START)):
        for name in sorted({name for texts in of_rank for name in texts}):
            values = group_ranks({rank: own.get(name) for rank, own in enumerate(of_rank)})
            if len(values) > 1:
                shown = {value: "not set" if value is None else repr(value) for value in values}
                who = "; ".join(f"{name_ranks(ranks)}: {shown[value]}" for value, ranks in values.items())
                raise TopologyError(f"the {what} {name} must be the same on all ranks: {who}; {advice}")


def _warn_of_unknown(variables: Mapping[str, str]) -> None:
    """Warn of `MPIDIST_` variables that mean nothing, of each once in a process."""
    for text in unknown_settings(variables):
        if text not in _warned:
            _warned.add(text)
            logger.warning("mpidist: %s", text)


def agreed_cost_model(comm: Intracomm, topology: Topology) -> CostModel:
    """Read what `python -m mpidist tune` has measured: on one rank, so that all ranks choose alike. Collective."""
    tuned = load_tuned(TuningKey.here(topology.node_sizes)) if topology.rank == 0 else None
    agreed: CostModel = comm.bcast(CostModel() if tuned is None else tuned.model, 0)
    return agreed


def discover(comm: Intracomm) -> tuple[Settings, Topology, str]:
    """Read the settings, find the node of each rank, and draw a random name for the group. Collective.

    If a rank's settings are invalid, or settings or versions differ, frees `comm`, and raises on every rank.
    """
    try:
        settings, error = Settings.from_environment(os.environ), None
    except ValueError as problem:
        settings, error = Settings(), str(problem)
    everyone: list[_Report] = comm.allgather(_Report.own(error, ranks_of_node(comm)[0]))
    try:
        _require_equal_settings(everyone)
        if comm.rank == 0:
            _warn_of_unknown(everyone[0].variables)
        topology = _topology(comm, everyone, settings)
    except (ValueError, TopologyError):
        comm.Free()
        raise
    settings.apply_log_level()
    first_here = everyone[comm.rank].first_here
    if settings.unlink_mpi_files and comm.rank == first_here and comm.size == load_mpi().COMM_WORLD.Get_size():
        unlink_files_of_all([report.mpi_files for report in everyone if report.first_here == first_here])
    return settings, topology, everyone[0].token


def shared_cache(processors: Iterable[int] | None = None, folder: Path = _PROCESSORS) -> str:
    """Name the last-level cache of the processors that this process may run on; "" if they share none, or unknown.

    The name is the system's list of the processors with that cache. `folder`: that of the system's files.
    """
    with suppress(OSError, ValueError):  # a system that does not show its caches
        own = os.sched_getaffinity(0) if processors is None else {*processors}
        caches = (folder / f"cpu{min(own)}" / "cache").glob("index*")
        last = max(caches, key=lambda cache: int((cache / "level").read_text()))
        name = (last / "shared_cpu_list").read_text().strip()
        if own <= _numbers(name):
            return name
    return ""


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",")]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _pretended(comm: Intracomm, variable: str, labels: tuple[int, ...] | None) -> list[int] | None:
    """Return the labels of the ranks of a group, of those that a variable gives all ranks of the world. Local."""
    if labels is None:
        return None
    in_job = load_mpi().COMM_WORLD.Get_size()
    if len(labels) != in_job:
        raise TopologyError(
            f"{variable} has the numbers of {count_text(len(labels), 'rank')}, and the world has {in_job}; give one "
            "number per rank, for example 0,0,1,1 for 4 ranks"
        )
    return [labels[number] for number in numbers_in_world(comm)]


def _topology(comm: Intracomm, everyone: Sequence[_Report], settings: Settings) -> Topology:
    """Find the node and the cache of each rank. Local."""
    first_here = [report.first_here for report in everyone]
    labels = _pretended(comm, "MPIDIST_PRETEND_NODES", settings.pretend_nodes) or first_here
    pretended = _pretended(comm, "MPIDIST_PRETEND_CACHES", settings.pretend_caches)
    caches = [report.cache for report in everyone] if pretended is None else [*map(str, pretended)]
    for label, ranks in group_ranks(dict(enumerate(labels))).items():
        if len({first_here[other] for other in ranks}) > 1:
            raise TopologyError(
                f"MPIDIST_PRETEND_NODES puts {name_ranks(ranks)} on node {label}, but they do not share memory; "
                "it can split real nodes, not join them"
            )
    return Topology.from_labels(comm.rank, labels, [report.hostname for report in everyone], caches)
