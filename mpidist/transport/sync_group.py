"""A group of ranks that work in step: its topology, its communicators, and its end.

Everything is made on duplicates of the user's communicator, so that the user's messages and ours never meet, and
freed in reverse order by `close`: communicators are never freed by garbage collection, which runs at other times on
other ranks.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, final

import numpy

from mpidist.errors import DeadlineExceededError, TopologyError, UnavailableError
from mpidist.transport import on_error
from mpidist.transport.agreement import LEAVE, Agreement, Arrival, Joining, MpiAgreement, SoloAgreement, fingerprint_of
from mpidist.transport.cost_model import CostModel
from mpidist.transport.launch import check_launch
from mpidist.transport.levels import Levels
from mpidist.transport.mpi import MAX_CHUNK_BYTES, Intracomm, command_line, load_mpi
from mpidist.transport.pending import PendingCalls
from mpidist.transport.ranks import name_ranks
from mpidist.transport.rounds import NodeRounds
from mpidist.transport.settings import Settings
from mpidist.transport.symmetric import SharedArrays
from mpidist.transport.topology import Topology
from mpidist.transport.tuning import TuningKey, load_cost_model
from mpidist.transport.waiting import set_crowded

__all__ = ["SyncGroup"]

_open_groups: Final[list[SyncGroup]] = []
_MAX_FINGERPRINTS: Final = 1024  # remembered


@final
class SyncGroup:
    """Ranks that make the same calls in the same order.

    Made by `solo` or `from_mpi`; the constructor only stores.

    Attributes:
        topology: The placement of the ranks.
        levels: The communicators of the topology, for host memory.
        shared: The arrays in memory that all ranks of a node reach.
        settings: What the environment says.
        cost_model: The speeds of the machine.
        calls: Calls that were started and not waited for.
    """

    def __init__(
        self,
        parent: Intracomm | None,
        topology: Topology,
        settings: Settings,
        max_chunk_bytes: int,
        cost_model: CostModel | None = None,
    ) -> None:
        self.topology = topology
        self.cost_model = CostModel() if cost_model is None else cost_model
        self.settings = settings
        self._parent = parent
        self._max_chunk_bytes = max_chunk_bytes
        self._is_closed = False
        self._is_of_parent = False  # whether this process is a fork of the one that made it
        self._fingerprints: dict[Hashable, int] = {}
        self.calls: PendingCalls
        self.levels: Levels
        self._agreement: Agreement
        self._connect()
        self.shared = SharedArrays(self.levels.within_node)

    @classmethod
    def solo(cls) -> SyncGroup:
        """Make the group of this process alone. Needs no MPI."""
        settings = Settings.from_environment(os.environ)
        settings.apply_log_level()
        return cls(None, Topology(0, (0,), (socket.gethostname(),)), settings, MAX_CHUNK_BYTES)

    @classmethod
    def from_mpi(cls, comm: Intracomm | None, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> SyncGroup:
        """Make the group of an MPI communicator's ranks. Collective over it.

        Args:
            comm: An intra-communicator of mpi4py; `None` is `MPI.COMM_WORLD`.
            max_chunk_bytes: Larger arrays are sent in several calls.

        Raises:
            UnavailableError: If there is no MPI.
            TopologyError: If the launcher started many worlds of one rank, or the ranks cannot work together.
            ValueError: If an `MPIDIST_` variable cannot be understood.
        """
        mpi = load_mpi()
        if comm is None:
            comm = mpi.COMM_WORLD
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise TypeError(f"comm must be an intra-communicator of mpi4py, got {comm!r}")
        check_launch(os.environ, mpi.COMM_WORLD.Get_size(), mpi.Get_library_version(), command_line())
        comm = comm.Dup()
        try:
            settings = _agreed_settings(comm)
            topology = _discover(comm, settings.pretend_nodes, mpi.COMM_WORLD)
        except (ValueError, TopologyError) as error:
            vars(error)["raised_on_all_ranks"] = True
            comm.Free()
            raise
        settings.apply_log_level()
        set_crowded(topology.hostnames.count(topology.hostnames[topology.rank]))
        if settings.abort_on_error and mpi.COMM_WORLD.Get_size() > 1:
            on_error.install(mpi.COMM_WORLD.Abort, mpi.COMM_WORLD.Get_rank(), socket.gethostname())
        try:
            return cls(comm, topology, settings, max_chunk_bytes, _agreed_cost_model(comm, topology))
        except UnavailableError:
            comm.Free()
            raise

    @staticmethod
    def num_open() -> int:
        """Count the groups of several ranks that this process has made and not closed."""
        return len(_open_groups)

    def require_open(self, call: str) -> None:
        """Refuse a call of a group that was closed, or that belongs to another process.

        Raises:
            RuntimeError: If it is one.
        """
        if self._is_of_parent:
            raise RuntimeError(
                f"{call} in a forked process: a strategy belongs to the process that made it; make collective calls in "
                "the parent alone, or start workers with multiprocessing.get_context('spawn')"
            )
        if self._is_closed:
            raise RuntimeError(f"{call} on a closed strategy: it was closed, make a new one")

    @property
    def is_node_barrier(self) -> bool:
        """Whether `agree` is a barrier of the node's shared memory, too."""
        return self._agreement.is_node_barrier

    def fingerprint(self, call: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> int:
        """Return a digest of what a call passes, for `agree`. Local.

        Args:
            call: As in `agree`.
            key: Equal only for equal descriptions; for this rank's own use, to make them once.
            describe: What must be equal on all ranks, as name and text.
        """
        known = self._fingerprints.get((call, key))
        if known is None:
            if len(self._fingerprints) >= _MAX_FINGERPRINTS:
                self._fingerprints.clear()
            known = self._fingerprints[call, key] = fingerprint_of((call, describe()))
        return known

    def agree(self, joining: Joining) -> bool:
        """Wait until all ranks make this call, and compare what they pass: `Agreement.join`. Collective."""
        self.require_open(joining.call)
        if self.calls:
            self.calls.finish()
        return self._agreement.join(joining)

    def arrive(self, joining: Joining) -> Arrival:
        """Join a round of a call that was started, without waiting: `Agreement.arrive`."""
        self.require_open(joining.call)
        return self._agreement.arrive(joining)

    def have_all_arrived(self) -> bool:
        """Whether all ranks have joined the round of `arrive`. Local."""
        return self._agreement.have_all_arrived()

    def conclude(self, arrival: Arrival) -> bool:
        """Wait for all ranks to join the round, and compare: `Agreement.conclude`."""
        return self._agreement.conclude(arrival)

    def require_peers(self) -> bool:
        """Raise if another rank has given up waiting: `Agreement.require_peers`. Local."""
        return self._agreement.require_peers()

    def break_off(self, error: BaseException) -> None:
        """Give up in the middle of a call, because of this rank's own error: `Agreement.break_off`. Local."""
        if not self._is_closed:
            self._agreement.break_off(error)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Break off if the body raises: it joins a call, and does this rank's part of it."""
        try:
            yield
        except GeneratorExit:  # a call that was given up by `reset` or `close`, which see to the rest
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    def disown(self) -> None:
        """Leave the group to the process that this one was forked from. Local."""
        self._is_of_parent = self._is_closed = True
        self.calls = PendingCalls(self.require_peers)

    def any_of(self, flags: int) -> int:
        """Unite the bits of all ranks' `flags`. Collective; call it after `agree`."""
        return self._agreement.any_of(flags)

    def exchange(self, item: Any) -> list[Any]:
        """Show every rank's picklable `item` to all ranks, in rank order. Collective; call it after `agree`."""
        return self._agreement.exchange(item)

    def reset(self) -> None:
        """Start anew on fresh communicators. Collective over all ranks.

        If the group failed on any rank, the old ones are left behind: messages of the call that failed may still be
        under way in them.
        """
        self.require_open("reset()")
        self.calls.abandon("reset()")
        if self._parent is not None and not any(self._parent.allgather(self._agreement.broken is not None)):
            self._free_levels()
        self._connect()
        self.shared.within_node = self.levels.within_node

    def close(self) -> None:
        """Free the communicators. Collective; a second call does nothing.

        Raises:
            PeerFailedError: If another rank makes another call instead.
        """
        if self._is_closed:
            return
        if self.calls and self._agreement.broken is None:
            self.calls.finish()
        self.calls.abandon("close()")
        self._is_closed = True
        if self in _open_groups:
            _open_groups.remove(self)
        if self._agreement.broken is None:
            with suppress(DeadlineExceededError):  # the others gave up before, and free nothing with this rank
                self._agreement.join(Joining(LEAVE, 0, dict))
        if self._agreement.broken is not None:
            return  # ranks that do not come cannot free together
        self.shared.free()
        self._free_levels()
        if self._parent is not None:
            self._parent.Free()

    def _free_levels(self) -> None:
        self._agreement.free()
        self.levels.free()

    def _connect(self) -> None:
        if self._parent is None or self.topology.size == 1:
            self.levels, self._agreement = Levels.solo(), SoloAgreement()
            self.calls = PendingCalls(self.require_peers)
            return
        settings = self.settings
        self.levels = Levels.from_mpi(
            self._parent, self.topology, self._max_chunk_bytes, settings.transport, self.cost_model
        )
        streams = self.levels.streams
        rounds = None if streams is None or streams.spans_nodes else NodeRounds(streams.slots.barrier)
        self._agreement = MpiAgreement(self._parent.Dup(), settings.check, settings.timeout_seconds, rounds)
        self.levels.watch(self._agreement.require_peers)
        allows_threads = load_mpi().Query_thread() == load_mpi().THREAD_MULTIPLE
        self.calls = PendingCalls(self.require_peers, allows_threads and (streams is None or streams.spans_nodes))
        if self not in _open_groups:
            _open_groups.append(self)


def _leave_to_parent() -> None:
    """Touch nothing of the parent's in a process that was forked from it, also at its end."""
    on_error.uninstall()
    while _open_groups:
        _open_groups.pop().disown()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _leave_all() -> None:
    """Tell the other ranks that this one's program ends, so that nobody waits for it."""
    while _open_groups and not load_mpi().Is_finalized():
        _open_groups[0].close()


def _agreed_settings(comm: Intracomm) -> Settings:
    """Read the environment, and see that all ranks read the same. Collective."""
    try:
        settings, error = Settings.from_environment(os.environ), None
    except ValueError as problem:
        settings, error = Settings(), str(problem)
    variables = {name: value for name, value in os.environ.items() if name.startswith("MPIDIST_")}
    versions = {"Python": sys.version.split()[0], "NumPy": numpy.__version__}
    everyone = comm.allgather((error, variables, versions))
    for rank, (its_error, _, _) in enumerate(everyone):
        if its_error:
            raise ValueError(f"rank {rank}: {its_error}")
    for what, reports in (("environment variable", 1), ("version", 2)):
        for name in sorted({name for report in everyone for name in report[reports]}):
            values: dict[Any, list[int]] = {}
            for rank, report in enumerate(everyone):
                values.setdefault(report[reports].get(name), []).append(rank)
            if len(values) > 1:
                who = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in values.items())
                raise TopologyError(f"the {what} of {name} must be the same on all ranks: {who}")
    return settings


def _agreed_cost_model(comm: Intracomm, topology: Topology) -> CostModel | None:
    """Read what `python -m mpidist tune` measured, on one rank, so that all choose alike. Collective."""
    model = load_cost_model(TuningKey.here(topology.node_sizes)) if topology.rank == 0 else None
    agreed: CostModel | None = comm.bcast(model, 0)
    return agreed


def _discover(comm: Intracomm, pretend_nodes: tuple[int, ...] | None, world: Intracomm) -> Topology:
    """Find out which ranks share memory. Collective."""
    mpi = load_mpi()
    rank, hostname = comm.Get_rank(), socket.gethostname()
    sharing = comm.Split_type(mpi.COMM_TYPE_SHARED, rank)
    first_here = sharing.bcast(rank, root=0)
    sharing.Free()
    label: Hashable = first_here
    if pretend_nodes is not None:
        if len(pretend_nodes) != world.Get_size():
            raise TopologyError(
                f"MPIDIST_PRETEND_NODES names the nodes of {len(pretend_nodes)} ranks, and the world has "
                f"{world.Get_size()}; give one number per rank, for example 0,0,1,1 for 4 ranks"
            )
        label = pretend_nodes[world.Get_rank()]
    everyone = comm.allgather((label, first_here, hostname))
    labels = [label for label, _, _ in everyone]
    for label, ranks in _group(labels).items():
        if len({everyone[other][1] for other in ranks}) > 1:
            raise TopologyError(
                f"MPIDIST_PRETEND_NODES puts {name_ranks(ranks)} on node {label}, but they do not share memory; "
                "it can split real nodes, not join them"
            )
    return Topology.from_labels(rank, labels, [hostname for _, _, hostname in everyone])


def _group(labels: list[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return groups
