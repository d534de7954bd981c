"""The levels of the machine for device memory: NCCL where it can be had, through the host elsewhere."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property, partial
from typing import Any, Final, final

from mpidist.errors import TopologyError, UnavailableError
from mpidist.transport import arrays, cuda
from mpidist.transport.agreement.agreement import Agreement
from mpidist.transport.communicator import Communicator, SoloCommunicator
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.cuda import INSTALL_CUPY
from mpidist.transport.device_over_mpi.messages import MessagedCommunicator
from mpidist.transport.device_over_mpi.pieces import StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging, wait_for_event
from mpidist.transport.devices import Device
from mpidist.transport.gpu.background import Background
from mpidist.transport.gpu.events import new_stream, on_stream, record_event
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.gpus_of_process import GpusOfProcess
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.settings import Settings
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import Patience

__all__ = ["DeviceLevels"]

logger = logging.getLogger("mpidist.transport")

_FIRST_NAP: Final = 0.001  # between two looks at whether all ranks have made a communicator
_LAST_NAP: Final = 0.05
_NO_NCCL: Final = "MPIDIST_NCCL=0 disables NCCL"
_NCCL: Final = (
    "NCCL could not be started ({}); NCCL_DEBUG=WARN prints more; MPIDIST_NCCL=0 uses the host instead of NCCL"
)
_KERNELS: Final = f"the GPU's kernels could not be compiled; CuPy needs NVRTC for that: {INSTALL_CUPY}"


@final
class DeviceLevels:
    """Makes a group's levels for device memory at their first use, when all ranks have agreed on a call."""

    def __init__(
        self, host: Levels, topology: Topology, agreement: Agreement, settings: Settings, cost_model: CostModel
    ) -> None:
        self._host, self._topology, self._agreement, self._settings = host, topology, agreement, settings
        self._kernels = DeviceKernels()
        is_alone = topology.num_nodes == 1
        speed = cost_model.stream_bytes_per_second if is_alone else cost_model.link_bytes_per_second
        sizes = StagingSizes(settings.staging_bytes, speed)
        self._staging_by = partial(Staging, sizes, self._kernels, self._wait_for_stream)
        self._levels: dict[bool, Levels] = {}
        self._own: list[NcclCommunicator | GpusOfProcess] = []
        self._gpus_of_process: dict[tuple[int, ...], GpusOfProcess | None] = {}
        self._device: int | None = None
        self._compiled: set[str] = set()
        self._queue: DeviceQueue | None = None
        self._new_stream = cache(new_stream)

    def work_on(self, device: Device) -> None:
        """Make a device of a strategy the current one, and the one of all calls, where it is a GPU. Local."""
        device.use()
        if device.is_gpu:
            self._device = device.index

    def use(self) -> None:
        """Make the GPU of all calls the current device of this thread. Local."""
        if self._device is not None:
            arrays.use_gpu(self._device)

    def private_stream(self, after: Any) -> AbstractContextManager[Any]:
        """Make a stream current that waits for an event alone: for work that must not wait for the caller's. Local."""
        stream = self._new_stream()
        stream.wait_event(after)
        return on_stream(stream)

    def require_usable(self, call: str) -> None:
        """Refuse a call with arrays of a GPU in a CUDA graph, or with another GPU than the strategy's. Local.

        A strategy that names no GPU has that of its first call. Each thread has its own current device: a thread that
        is started later begins with GPU 0.
        """
        arrays.require_not_capturing(call)
        current = arrays.current_gpu()
        if self._device is None:
            self._device = current
        if current != self._device:
            raise RuntimeError(
                f"{call} with GPU {current} as the current device, and this strategy works on GPU {self._device}: call "
                f"cupy.cuda.Device({self._device}).use() in this thread, or use one strategy for each device"
            )

    def levels(self, everywhere: bool = False) -> Levels:
        """Return the levels. Collective at its first call, and at the first with `everywhere`.

        Args:
            everywhere: Whether NCCL must be used within nodes and between them; else it is within nodes, if available.

        Raises:
            UnavailableError: If NCCL must be used and cannot, or cannot be started. On every rank.
            TopologyError: If ranks have other versions of NCCL. On every rank.
        """
        if everywhere not in self._levels:
            try:
                self._levels[everywhere] = self._make(everywhere)
            except (UnavailableError, TopologyError) as error:
                mark_shared(error, self._agreement.ranks)  # every rank knows what all have told
                raise
        return self._levels[everywhere]

    def compile(self, kernels: set[str]) -> None:
        """Compile kernels, equal on all ranks, before a launch needs them, while no deadline runs. Collective.

        Ranks without NVRTC raise an error, and ranks whose disk has the kernels wait for those that take seconds. Those
        that this group has already compiled cost nothing.

        Raises:
            UnavailableError: If a rank cannot. On every rank.
        """
        missing = sorted(kernels - self._compiled) if self._topology.size > 1 else []
        if missing:
            self.compile_by(partial(self._kernels.compile, missing))
            self._compiled |= kernels

    def compile_by(self, work: Callable[[], None]) -> None:
        """Compile kernels on each rank by `work`, while no deadline runs. Collective; raises as `compile` does."""
        self._wait_for_all(_KERNELS, Background("mpidist kernels", work))

    def has_compiled(self, kernels: set[str]) -> bool:
        """Whether `compile` has been called with these kernels. Local, and equal on all ranks."""
        return kernels <= self._compiled

    def made(self, everywhere: bool = False) -> Levels | None:
        """Return the levels if a call has made them, which is so on all ranks or on none. Local."""
        return self._levels.get(everywhere)

    def gpus_of_process(self, indices: tuple[int, ...]) -> GpusOfProcess | None:
        """Return GPUs of this process, the current device first, joined by NCCL; `None` without NCCL. Local."""
        if indices not in self._gpus_of_process:
            reason = cuda.current().support.reason if self._settings.nccl else _NO_NCCL
            made = None
            if reason:
                logger.warning("replicas on several GPUs of one rank are added on the first one of them: %s", reason)
            else:
                patience = Patience(self._settings.stall_seconds, self._settings.timeout_seconds)
                made = GpusOfProcess(indices, patience)
                self._own.append(made)
            self._gpus_of_process[indices] = made
        return self._gpus_of_process[indices]

    @cached_property
    def _staging(self) -> Staging:
        return self._staging_by()

    @cached_property
    def staged(self) -> Levels:
        """The levels through the host. Local."""
        levels = self._host.world, self._host.within_node, self._host.across_nodes
        world, within, across = (self._over(level, self._staging) for level in levels)
        return Levels(world, within, across, self._host.is_even, kernels=self._kernels)

    @property
    def overflowed(self) -> int:
        """Number of finite values that became infinite float16 in compression on this rank's GPU."""
        return self._kernels.overflowed

    def wait_for_launches(self, what: str) -> None:
        """Wait on the host until the GPU has done this rank's calls and current stream. `what`: for errors."""
        if self._queue is not None:
            self._queue.drain()
        wait_for_event(record_event(), what, self._agreement.check_peers)

    def free(self) -> None:
        """Destroy NCCL's communicators, last made first. Collective."""
        while self._own:
            self._own.pop().free()
        self._forget()
        if "_staging" in vars(self):
            self._staging.free()

    def abandon(self) -> None:
        """Abort NCCL's communicators, after a call that failed. Local."""
        if self._own:
            nccl_handles.abort_all("a call of its ranks failed")
            nccl_handles.wait_for_endings()
        if self._queue is not None:
            self._queue.give_up(RuntimeError("a call of its ranks failed"))
        self._forget()

    def _forget(self) -> None:
        self._queue = None
        for made in (self._own, self._levels, self._gpus_of_process):
            made.clear()

    def _wait_for_stream(self, what: str) -> None:
        if self._queue is not None:
            self._queue.wait_for_stream(what)

    def _make(self, everywhere: bool) -> Levels:
        topology = self._topology
        if topology.size == 1:
            return Levels.solo(self._kernels)
        self.compile({"copy_4"})  # by which ranks without NVRTC are found
        spans_nodes = topology.num_nodes > 1
        groups: list[Sequence[int]] = [range(topology.size)] if everywhere else list(topology.nodes)
        reason = self._reason([ranks for ranks in groups if len(ranks) > 1])
        if reason:
            if everywhere:
                raise UnavailableError(f'implementation="NCCL" cannot be had: {reason}; or use implementation="AUTO"')
            if topology.rank == 0:
                logger.warning("device memory goes from rank to rank through the host, which is slower: %s", reason)
            return self.staged
        if everywhere and not spans_nodes:
            return self.levels()
        if self._queue is None:
            self._queue = DeviceQueue()
        is_all_nccl = everywhere or not spans_nodes
        across: Communicator = SoloCommunicator("across_nodes", device=True)
        if everywhere:
            within = self.levels().within_node
            world = self._connect("world", groups)
            lanes = range(max(topology.node_sizes))
            of_lanes = [[ranks[at] for ranks in topology.nodes if len(ranks) > at] for at in lanes]
            across = self._connect("across_nodes", of_lanes)
        else:
            world = within = self._connect("within_node", groups)
            if spans_nodes:
                world, across = self._between_nodes()
        return Levels(world, within, across, self._host.is_even, None, self._queue, is_all_nccl, self._kernels)

    def _between_nodes(self) -> tuple[Communicator, Communicator]:
        """Choose the link between nodes: device memory by MPI, if the user enables it; else the host. Local."""
        if not self._settings.device_mpi:
            return self.staged.world, self.staged.across_nodes
        direct = self._staging_by(is_direct=True)
        return self._over(self._host.world, direct), self._over(self._host.across_nodes, direct)

    def _over(self, host: Communicator, staging: Staging) -> Communicator:
        """Make the communicator for device memory whose messages a communicator of host memory carries. Local."""
        if isinstance(host, SoloCommunicator):
            return SoloCommunicator(host.name, device=True)
        assert isinstance(host, (MpiCommunicator, SharedMemoryCommunicator))
        made = MessagedCommunicator(host, staging)
        made.set_wait_hook(self._agreement.check_peers)
        return made

    def _reason(self, groups: Sequence[Sequence[int]]) -> str:
        if not groups:
            return ""
        if not self._settings.nccl:
            return _NO_NCCL
        facts = GpuFacts.here(cuda.current(), os.environ, self._topology.hostnames[self._topology.rank])
        return reason_against_nccl(self._agreement.all_gather_object(facts), groups, self._topology.hostnames)

    def _connect(self, name: str, groups: Sequence[Sequence[int]]) -> Communicator:
        """Make the NCCL communicator of this rank's group, all groups at a time. Collective over all ranks."""
        ranks = next(list(ranks) for ranks in groups if self._topology.rank in ranks)
        place = ranks.index(self._topology.rank)
        offers = self._agreement.all_gather_object(self._offer() if len(ranks) > 1 and place == 0 else ("", b""))
        self._raise_first(_NCCL.format(name), [error for error, _ in offers])
        if len(ranks) == 1:
            self._wait_for_all(_NCCL.format(name), None)
            return SoloCommunicator(name, device=True)
        init = nccl_handles.start_init(len(ranks), offers[ranks[0]][1], {place: arrays.current_gpu()})
        try:
            self._wait_for_all(_NCCL.format(name), init)
        except BaseException:
            init.cancel()
            raise
        (handle,) = init.wait()
        assert self._queue is not None
        communicator = NcclCommunicator(handle, name, place, len(ranks), self._queue, self._kernels)
        communicator.set_wait_hook(self._agreement.check_peers)
        self._own.append(communicator)
        if len(ranks) == max(map(len, groups)) and self._topology.rank == 0:
            logger.info("NCCL %s: %s on GPUs", name, name_ranks(ranks))
        return communicator

    def _offer(self) -> tuple[str, bytes]:
        try:
            return "", bytes(cuda.nccl().get_unique_id())
        except Exception as error:  # whatever it is, the other ranks must learn of it
            return nccl_handles.error_text(error), b""

    def _wait_for_all(self, failure: str, work: Background[Any] | None) -> None:
        """Wait until the work of all ranks is over, or that of one has failed: nobody stays in NCCL's. Collective."""
        nap, until = _FIRST_NAP, time.monotonic() + nccl_handles.START_SECONDS
        while True:
            self._agreement.restart_clock()  # all ranks have come; what takes its time now is NCCL, or NVRTC
            is_over, error = (True, "") if work is None else work.outcome()
            seen = self._agreement.all_gather_object((is_over, error, time.monotonic() > until))
            is_late = any(late for *_, late in seen)  # on all ranks alike
            late = f"it did not start within {nccl_handles.START_SECONDS:g} s"
            self._raise_first(failure, [report or late * (is_late and not done) for done, report, _ in seen])
            if all(done for done, *_ in seen):
                return
            time.sleep(nap)
            nap = min(2 * nap, _LAST_NAP)

    def _raise_first(self, failure: str, errors: Sequence[str]) -> None:
        """Raise the first of the exchanged errors of all ranks."""
        failed = [rank for rank, error in enumerate(errors) if error]
        if failed:
            what, _, remedy = failure.partition("; ")
            raised = UnavailableError(f"{what}: {name_ranks(failed)}: {errors[failed[0]]}. {remedy}")
            mark_shared(raised, self._agreement.ranks)
            raise raised
