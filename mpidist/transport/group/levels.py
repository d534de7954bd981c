"""The communicators of a topology: all ranks, the ranks of a node, and one rank of every node."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.communicator import Array, Communicator, SoloCommunicator, Traffic
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.gpu.kernels import DeviceCopy, DeviceKernels, kernels_needed
from mpidist.transport.group.compression import CompressingCommunicator
from mpidist.transport.host_memory.result_memory import most_result_bytes
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.mpi.library import Intracomm, greatest
from mpidist.transport.mpi.open_mpi import eager_limit_bytes
from mpidist.transport.native.loading import native
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.node_memory.window import file_system_bytes
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import FusedReducer, InterNode
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.two_shot import GROUPS_DEPTH
from mpidist.transport.topology import Topology

__all__ = ["Levels", "on_node", "report_no_shared_memory"]

logger = logging.getLogger("mpidist.transport")

# Without shared memory: (one node, several nodes). On one node packing costs two passes through memory: packs fit into
# a core's cache, and arrays of at least _DIRECT_BYTES are not packed. Between nodes every message costs latency: packs
# are large.
_DIRECT_BYTES: Final = (32 << 10, 1 << 20)
_PACK_BYTES: Final = (256 << 10, 4 << 20)

# The same for device memory: a call of NCCL has a fixed cost, and packing costs two passes through memory at 3 TB/s, so
# that few long messages are best: 161 arrays (102 MB) of two ranks on an H100 take 60.9 ms, and with 4 MiB here 83.3.
_DIRECT_BYTES_OF_DEVICE: Final = 16 << 20
_PACK_BYTES_OF_DEVICE: Final = 32 << 20
_RESULTS_OF_SHARED_MEMORY: Final = 1 / 4  # the most that results take of the node's memory file system
_LEFT_BY_RESULTS: Final = 1 / 2  # how much of it results leave free, as they can lie elsewhere and other arrays cannot
_SAME_STREAM: Final = nullcontext()


@final
@dataclass(frozen=True)
class Levels:
    """The communicators of an all-reduce algorithm, one for each level of the machine, for one kind of memory.

    Attributes:
        world: All ranks of the group.
        within_node: The ranks of this rank's node, in rank order.
        across_nodes: The ranks with this rank's local rank, in order of nodes.
        is_even: Whether all nodes have equally many ranks, so that `across_nodes` of every rank has all nodes.
        fused: Reduces lists of arrays over all ranks through shared memory; `None` without shared memory.
        queue: The queue of NCCL's launches; `None` without NCCL.
        is_all_nccl: Whether no communicator for device memory needs the host.
        kernels: What copies and reduces device memory; `None` of levels for host memory.
    """

    world: Communicator
    within_node: Communicator
    across_nodes: Communicator
    is_even: bool
    fused: FusedReducer | None = None
    queue: DeviceQueue | None = None
    is_all_nccl: bool = False
    kernels: DeviceKernels | None = None
    _compressed: dict[np.dtype[Any], Levels] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def solo(cls, kernels: DeviceKernels | None = None) -> Levels:
        """Make the levels of a group of one, for device memory if there are kernels."""
        device = kernels is not None
        world, within, across = (SoloCommunicator(name, device) for name in ("world", "within_node", "across_nodes"))
        return cls(world, within, across, True, is_all_nccl=device, kernels=kernels)

    @classmethod
    def from_mpi(
        cls,
        comm: Intracomm,
        topology: Topology,
        transport: str = "auto",
        cost_model: CostModel | None = None,
    ) -> Levels:
        """Split a communicator by nodes; its duplicates and parts become the levels. Collective.

        Ranks of a node communicate by `Settings.transport`; if that requires shared memory and it is not
        available, every rank raises. `cost_model`: the same on all ranks; by default that of a common machine.
        """
        eager = MAX_CHUNK_BYTES
        if topology.num_nodes > 1:
            eager = -greatest(comm, -(eager_limit_bytes() or eager))  # limits may differ from node to node
        world = _make_level(comm.Dup(), "world", eager)
        within = _make_level(_within_node(comm, topology), "within_node")
        across = _make_level(_across_nodes(comm, topology), "across_nodes", eager)
        model = CostModel() if cost_model is None else cost_model
        slots, reason = None, None
        if transport != "mpi":
            slots, reason = _make_slots(comm, within, topology, model)
        if slots is None:
            levels = cls(world, within, across, topology.is_even)
            if reason is not None:
                report_no_shared_memory(reason, transport, world.rank, levels.free)
            return levels
        one_shot_bytes = model.one_shot_bytes((within.size,))
        if isinstance(within, MpiCommunicator):
            reducer = FusedReducer(slots, within.size, one_shot_bytes, within.traffic, groups=topology.cache_groups)
            within = SharedMemoryCommunicator(within, reducer)
        if topology.num_nodes > 1:
            fused = _inter_node_reducer(slots, across, topology, model, within.traffic)
        else:
            arena = _make_result_arena(world)
            groups = topology.cache_groups
            fused = FusedReducer(slots, world.size, one_shot_bytes, world.traffic, result_arena=arena, groups=groups)
            world = SharedMemoryCommunicator(world, fused) if isinstance(world, MpiCommunicator) else world
        return cls(world, within, across, topology.is_even, fused)

    def compressed(self, half: np.dtype[Any] | None) -> Levels:
        """Return levels whose `world` and `across_nodes` send float32 in half precision; these for `None`. Local."""
        if half is None:
            return self
        if half not in self._compressed:
            world, across = self.world, self.across_nodes
            if world.size > 1:
                world = CompressingCommunicator(world, half, self.kernels)
            if across.size > 1:
                across = CompressingCommunicator(across, half, self.kernels)
            self._compressed[half] = replace(self, world=world, across_nodes=across, _compressed={})
        return self._compressed[half]

    def message_bytes(self, device: bool) -> tuple[int, int]:
        """Return the fastest sizes of messages, in bytes: from which size on arrays are not packed, and that of a pack.

        Args:
            device: Whether the arrays lie in device memory.
        """
        spans_nodes = self.within_node.size < self.world.size
        if self.world.size == 1:
            return 1, _PACK_BYTES[spans_nodes]
        if device:
            return _DIRECT_BYTES_OF_DEVICE, _PACK_BYTES_OF_DEVICE
        return _DIRECT_BYTES[spans_nodes], _PACK_BYTES[spans_nodes]

    @property
    def overflowed(self) -> int:
        """Number of finite values that this rank rounded to an infinite float16."""
        return sum(level.traffic.overflowed for level in (self.world, self.within_node, self.across_nodes))

    def kernels_for(
        self,
        wire: np.dtype[Any],
        half: np.dtype[Any] | None,
        reduction: Reduction,
        copies: Iterable[DeviceCopy] = (),
        num: int = 1,
    ) -> set[str]:
        """Return the kernels that a reduction may need on the GPU of some rank. Local, equal on all ranks.

        `wire` is the dtype of the buffer; `num` arrays are copied to it, or back, together.
        """
        added = {wire} if half is None else {wire, half}  # the dtypes that kernels add
        if isinstance(self.world, NcclCommunicator):
            added = {dtype for dtype in added if self.world.native_dtype(dtype, reduction) is None}
        elif self.world.size == 1:
            added = set()
        casts = () if half is None else ((wire, half, False), (half, wire, False))
        return kernels_needed({*copies, *casts}, [(dtype, reduction.op) for dtype in added], num)

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory to pack into: the queue's, which is safe on several streams, or `Communicator.pack_buffer`."""
        if self.queue is None:
            return self.within_node.pack_buffer(count, dtype)
        return self.queue.buffer("pack", count * dtype.itemsize).view(dtype)

    def packing(self) -> AbstractContextManager[None]:
        """Pack a message in the body, while another one may be under way: `DeviceQueue.packing`."""
        return _SAME_STREAM if self.queue is None else self.queue.packing()

    def unpacking(self) -> AbstractContextManager[None]:
        """Unpack the last message in the body, while the next one may be under way: `DeviceQueue.unpacking`."""
        return _SAME_STREAM if self.queue is None else self.queue.unpacking()

    def set_wait_hook(self, check_peers: Callable[[], None]) -> None:
        """Set the function that communicators call while this rank waits for others; it may raise."""
        for level in (self.world, self.within_node, self.across_nodes):
            level.set_wait_hook(check_peers)
        if self.fused is not None:
            self.fused.check_peers = check_peers

    def abandon(self) -> None:
        """Abandon incomplete messages of a call that failed. Local; the levels cannot be used again."""
        if self.fused is not None:
            self.fused.abandon()

    def free(self) -> None:
        """Free the communicators in reverse order, and the staging memory. Collective."""
        for level in (self.across_nodes, self.within_node, self.world):
            level.free()
        if self.fused is not None:
            self.fused.free()
            self.fused.slots.free()


def _within_node(comm: Intracomm, topology: Topology) -> Intracomm | None:
    """Make a communicator of the ranks of this rank's node, in rank order; `None` for a single rank. Collective."""
    if topology.size > 1 == topology.num_nodes:  # a duplicate takes half the messages of a split
        return comm.Dup()
    return _split(comm, topology.node, topology.rank) if max(topology.node_sizes) > 1 else None


def _across_nodes(comm: Intracomm, topology: Topology) -> Intracomm | None:
    """Make a communicator of the ranks with this local rank, in order of nodes; `None` for an only one. Collective."""
    return _split(comm, topology.local_rank, topology.node) if topology.num_nodes > 1 else None


@contextmanager
def on_node(comm: Intracomm, topology: Topology) -> Iterator[Intracomm | None]:
    """Let the body exchange messages with the ranks of this rank's node: as `_within_node`, but free it. Collective."""
    if topology.size > 1 == topology.num_nodes:
        yield comm
        return
    node = _within_node(comm, topology)
    try:
        yield node
    finally:
        if node is not None:
            node.Free()


def _split(comm: Intracomm, color: int, key: int) -> Intracomm | None:
    part = cast("Intracomm", comm.Split(color, key))  # mpi4py's stubs call it a Comm
    if part.Get_size() > 1:
        return part
    part.Free()
    return None


def report_no_shared_memory(reason: str, transport: str, rank: int, free: Callable[[], None]) -> None:
    """Warn on rank 0 that there is no shared memory; where it is required, `free` the group and raise. Collective."""
    if transport == "shared_memory":
        free()
        raise UnavailableError(f"MPIDIST_TRANSPORT=shared_memory cannot be followed: {reason}")
    if rank == 0:
        logger.warning("ranks of a node send messages instead of sharing memory, which is slower: %s", reason)


def _inter_node_reducer(
    slots: Slots, across: Communicator, topology: Topology, model: CostModel, traffic: Traffic
) -> FusedReducer:
    lanes = min(topology.node_sizes)
    exchange = None
    if topology.local_rank < lanes:
        exchange = ShardExchange(cast("MpiCommunicator", across))
    is_in_blocks = list(topology.node_of_rank) == sorted(topology.node_of_rank)
    inter_node = InterNode(exchange, model.least_bytes(topology.node_sizes), is_in_blocks)
    return FusedReducer(slots, lanes, one_shot_bytes=0, traffic=traffic, across=inter_node)


def _make_slots(
    comm: Intracomm, within: Communicator, topology: Topology, model: CostModel
) -> tuple[Slots | None, str | None]:
    """Make the staging memory of each node: on all nodes, or on none, with the reason. Collective over all ranks."""
    node = within.comm if isinstance(within, MpiCommunicator) else None
    slots, reason = None, None
    try:
        depth = max(model.depth(topology.node_sizes), GROUPS_DEPTH if topology.cache_groups else 0)
        slots = Slots(node, model.chunk_bytes(topology.node_sizes), depth)
    except UnavailableError as error:
        reason = f"rank {topology.rank}: {error}"
    if reason is None and topology.num_nodes == 1:  # a reason would be that of all ranks of the node
        return slots, None
    reasons = [text for text in comm.allgather(reason) if text is not None]
    if not reasons:
        return slots, None
    if slots is not None:
        slots.free()
    return None, reasons[0]


def _make_result_arena(world: Communicator) -> SharedArena | None:
    """Make the shared memory of results, if the compiled code of all ranks can write there. Collective."""
    if not isinstance(world, MpiCommunicator) or greatest(world.comm, native is None):
        return None
    most = most_result_bytes(world.size)
    try:
        most = min(most, int(file_system_bytes()[0] * _RESULTS_OF_SHARED_MEMORY / world.size))
        return SharedArena(world.comm, mmap.PAGESIZE, most, left_to_others=_LEFT_BY_RESULTS)
    except (OSError, UnavailableError):  # on every rank
        return None


def _make_level(part: Intracomm | None, name: str, message_bytes: int = MAX_CHUNK_BYTES) -> Communicator:
    return SoloCommunicator(name) if part is None else MpiCommunicator(part, name, message_bytes=message_bytes)
