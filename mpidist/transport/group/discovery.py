"""What ranks exchange before they form a group: settings, versions, costs, and which ranks share memory."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Hashable, Mapping
from typing import Any, Final

import numpy

from mpidist.errors import DeadlineExceededError, TopologyError
from mpidist.transport.costs import CostModel, TuningKey, load_tuned
from mpidist.transport.failures import open_groups
from mpidist.transport.mpi import (
    INHERITS_FROM_RANK,
    Intracomm,
    check_launch,
    command_line,
    launcher_here,
    load_mpi,
    mark_rank,
    ranks_in_world,
    require_no_child,
)
from mpidist.transport.settings import Settings, unknown_settings
from mpidist.transport.text import count_text, name_ranks
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import poll_or_keep

__all__ = [
    "agreed_cost_model",
    "agreed_token",
    "communicators",
    "discover",
    "wait_for_all_ranks",
    "own_settings",
]

logger = logging.getLogger("mpidist.transport")

_warned: Final[set[str]] = set()
_SET: Final = "set it where the job is started, and let the launcher pass it on to all ranks"
_START: Final = "start all ranks in one environment of Python"


def communicators(comm: Intracomm | None) -> tuple[Intracomm, Intracomm]:
    """Initialize MPI, unless the program has, and check that the launcher started one world of ranks.

    Args:
        comm: The ranks of a group; `None` for all ranks of the job.

    Returns:
        The ranks of the group, and all ranks of the job.

    Raises:
        TypeError: If `comm` is no intra-communicator of mpi4py.
        UnavailableError: If there is no MPI.
        TopologyError: If this process is a child of a rank, or one of many worlds of one rank.
    """
    require_no_child(os.environ)
    mpi = load_mpi()
    mark_rank(os.environ)
    world: Intracomm = mpi.COMM_WORLD
    version = mpi.Get_library_version()
    check_launch(os.environ, world.Get_size(), version, command_line(), INHERITS_FROM_RANK)
    comm = world if comm is None else comm
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise TypeError(f"comm must be an intra-communicator of mpi4py, got {comm!r}")
    return comm, world


def wait_for_all_ranks(comm: Intracomm, settings: Settings) -> None:
    """Wait until all ranks build a group. Collective.

    Args:
        comm: The ranks.
        settings: This rank's settings.

    Raises:
        UnavailableError: If an earlier group could not be built.
        DeadlineExceededError: If some ranks do not come within `MPIDIST_TIMEOUT_SECONDS`.
    """
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
            open_groups.record_build_failure("not all ranks came to build a strategy")
            raise DeadlineExceededError(
                f"{text} came to build it. Every rank must build the same strategies in the same order; see which "
                "rank's program has ended, or does not come this far"
            )
        if now >= warn_at:
            warn_at = math.inf
            if _is_first_to_bind(mark, comm):
                logger.warning("mpidist: %s have come to build it", text)

    with mark:
        for _ in range(2):  # a rank that arrives after others gave up completes the first barrier, not the second
            request = comm.Ibarrier()
            poll_or_keep(request.Test, check_peers, (request,))


def _is_first_to_bind(mark: socket.socket, comm: Intracomm) -> bool:
    """Whether this is the first rank of its node that asks: any rank may be missing, and the ranks share nothing yet.

    The ranks of a node come from one process of the launcher, after which the address is named, also if a shell starts
    each of them. It is no file, and free again when the socket is closed.
    """
    launcher = launcher_here() or os.getppid()
    try:
        mark.bind(f"\0mpidist: rank {min(ranks_in_world(comm))} of launcher {launcher} and others build a strategy")
    except OSError:
        return False
    return True


def own_settings() -> Settings:
    """Read this rank's settings, and set the log level. Local.

    Returns defaults if a setting is invalid: `discover` raises the error later, on all ranks.
    """
    try:
        settings = Settings.from_environment(os.environ)
    except ValueError:
        return Settings()
    settings.apply_log_level()
    return settings


def agreed_token(comm: Intracomm) -> str:
    """Choose a random name for a group, equal on all ranks. Collective."""
    token: str = comm.bcast(secrets.token_hex(4) if comm.rank == 0 else None, 0)
    return token


def _agreed_settings(comm: Intracomm) -> Settings:
    """Read the settings, and check that settings and versions are equal on all ranks. Collective."""
    try:
        settings, error = Settings.from_environment(os.environ), None
    except ValueError as problem:
        settings, error = Settings(), str(problem)
    variables = {name: value for name, value in os.environ.items() if name.startswith("MPIDIST_")}
    versions = {"Python": sys.version.split()[0], "NumPy": numpy.__version__}
    everyone = comm.allgather((error, variables, versions))
    for rank, (rank_error, _, _) in enumerate(everyone):
        if rank_error:
            raise ValueError(f"rank {rank}: {rank_error}")
    for what, reports, advice in (("environment variable", 1, _SET), ("version of", 2, _START)):
        for name in sorted({name for report in everyone for name in report[reports]}):
            values: dict[Any, list[int]] = {}
            for rank, report in enumerate(everyone):
                values.setdefault(report[reports].get(name), []).append(rank)
            if len(values) > 1:
                texts = {value: "not set" if value is None else repr(value) for value in values}
                who = "; ".join(f"{name_ranks(ranks)}: {texts[value]}" for value, ranks in values.items())
                raise TopologyError(f"the {what} {name} must be the same on all ranks: {who}; {advice}")
    if comm.rank == 0:
        _warn_of_unknown(variables)
    return settings


def _warn_of_unknown(variables: Mapping[str, str]) -> None:
    """Warn of `MPIDIST_` variables that mean nothing, of each once in a process."""
    for text in unknown_settings(variables):
        if text not in _warned:
            _warned.add(text)
            logger.warning("mpidist: %s", text)


def agreed_cost_model(comm: Intracomm, topology: Topology) -> CostModel | None:
    """Read what `python -m mpidist tune` has measured: on one rank, so that all ranks choose alike. Collective."""
    tuned = load_tuned(TuningKey.here(topology.node_sizes)) if topology.rank == 0 else None
    agreed: CostModel | None = comm.bcast(tuned and tuned.model, 0)
    return agreed


def discover(comm: Intracomm, world: Intracomm) -> tuple[Settings, Topology]:
    """Read the settings, which must be equal on all ranks, and find the node of each rank. Collective.

    Args:
        comm: The ranks. Freed if an error is raised.
        world: All ranks of the job.

    Raises:
        ValueError: If a rank's environment variable is invalid. On every rank.
        TopologyError: If settings or versions differ, or `MPIDIST_PRETEND_NODES` does not fit. On every rank.
    """
    try:
        settings = _agreed_settings(comm)
        topology = _topology(comm, settings.pretend_nodes, world)
    except (ValueError, TopologyError):
        comm.Free()
        raise
    settings.apply_log_level()
    return settings, topology


def _topology(comm: Intracomm, pretend_nodes: tuple[int, ...] | None, world: Intracomm) -> Topology:
    """Find the ranks that share memory. Collective."""
    mpi = load_mpi()
    rank, hostname = comm.Get_rank(), socket.gethostname()
    sharing = comm.Split_type(mpi.COMM_TYPE_SHARED, rank)
    first_here = sharing.bcast(rank, root=0)
    sharing.Free()
    label: Hashable = first_here
    if pretend_nodes is not None:
        if len(pretend_nodes) != world.Get_size():
            raise TopologyError(
                f"MPIDIST_PRETEND_NODES names the nodes of {count_text(len(pretend_nodes), 'rank')}, and the world has "
                f"{world.Get_size()}; give one number per rank, for example 0,0,1,1 for 4 ranks"
            )
        label = pretend_nodes[world.Get_rank()]
    everyone = comm.allgather((label, first_here, hostname))
    labels = [label for label, _, _ in everyone]
    for label, ranks in _group_by_label(labels).items():
        if len({everyone[other][1] for other in ranks}) > 1:
            raise TopologyError(
                f"MPIDIST_PRETEND_NODES puts {name_ranks(ranks)} on node {label}, but they do not share memory; "
                "it can split real nodes, not join them"
            )
    return Topology.from_labels(rank, labels, [hostname for _, _, hostname in everyone])


def _group_by_label(labels: list[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return groups
