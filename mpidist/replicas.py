"""Which replicas a rank carries, on which devices, and how many there are in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from mpidist.errors import TopologyError
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.devices import Device, are_several_gpus, choose_device
from mpidist.transport.text import count_text, name_ranks
from mpidist.transport.topology import Topology
from mpidist.transport.tree import ReplicaTree
from mpidist.whole_number import whole_number

__all__ = ["Replicas", "devices_on_one_node"]


@final
@dataclass(frozen=True)
class Replicas:
    """Which replicas of a strategy this rank carries.

    Attributes:
        tree: The order in which values of replicas are added, if their number was chosen; else `None`.
        devices: The device of each replica that this rank carries, once they are known.
        are_bare: Whether a value that is not distributed is the value of this rank's one replica: so it is if their
            number was not chosen, and in `run`.
    """

    ids_here: range
    total: int
    tree: ReplicaTree | None = None
    devices: tuple[Device, ...] = ()
    are_bare: bool = True

    @classmethod
    def one_per_rank(cls, topology: Topology) -> Replicas:
        """Return the assignment of one replica to each rank: replica r to rank r."""
        return cls(range(topology.rank, topology.rank + 1), topology.size)

    @classmethod
    def in_blocks(cls, total: int, topology: Topology) -> Replicas:
        """Lay replicas over the ranks in blocks, whose sizes differ by at most one, larger blocks first."""
        total = whole_number("replicas", total)
        if total < topology.size:
            raise ValueError(
                f"replicas={total} is too few for {count_text(topology.size, 'rank')}, as each rank carries at "
                f"least one; choose replicas={topology.size} or more, or start fewer ranks"
            )
        bounds = shard_bounds(total, topology.size)
        ids_here = range(bounds[topology.rank], bounds[topology.rank + 1])
        return cls(ids_here, total, ReplicaTree(tuple(bounds), topology), are_bare=False)

    def __str__(self) -> str:  # ranks compare it
        return "one on each rank" if self.tree is None else f"{self.total}, chosen"

    @property
    def has_first(self) -> bool:
        """Whether this rank carries replica 0."""
        return 0 in self.ids_here

    @cached_property
    def gpus_here(self) -> tuple[int, ...]:
        """The GPU of each of this rank's replicas, if there are several, each with one of its own; else `()`."""
        indices = tuple(device.index for device in self.devices if device.is_gpu)
        have_one_each = len(self.devices) == len(set(indices)) > 1
        return indices if have_one_each else ()

    @cached_property
    def has_several_gpus(self) -> bool:
        """Whether the replicas of this rank compute on different devices, of which some are GPUs."""
        return are_several_gpus(self.devices)

    @property
    def share_ranks(self) -> bool:
        """Whether a rank carries several replicas: this one or another."""
        return self.tree is not None and self.total > self.tree.topology.size

    @property
    def num_here(self) -> int:
        """Number of replicas that this rank carries."""
        return len(self.ids_here)


def devices_on_one_node(
    strategy: str, topology: Topology, devices: Sequence[str] | str | None, total: int | None = None
) -> tuple[list[Device], Replicas | None]:
    """Choose the devices of this rank's replicas, for a strategy whose ranks share a node. Local.

    Devices are given for every replica, in order, or as one string for this rank; by default each rank takes the GPU of
    its local rank, or the CPU where there is none. The replicas are `None` if each rank is one replica.

    Raises:
        TopologyError: If the ranks are on several nodes.
        TypeError: If `devices` is neither a string nor a sequence.
        ValueError: If there are fewer devices or replicas than ranks, if their numbers differ, or if a device string is
            not understood.
    """
    _require_one_node(strategy, topology)
    if devices is not None and not isinstance(devices, Sequence):
        raise TypeError(f"devices must be a device string or a sequence of them, got {devices!r}")
    if devices is None or isinstance(devices, str):
        device = choose_device(topology) if devices is None else Device.parse(devices)
        replicas = None if total is None else Replicas.in_blocks(total, topology)
        return [device] * (1 if replicas is None else replicas.num_here), replicas
    if len(devices) < topology.size:
        raise ValueError(
            f"{strategy} got {len(devices)} devices for {topology.size} ranks, and needs one for each rank at "
            f"least; start fewer ranks: `mpiexec -n {max(len(devices), 1)} python ...`"
        )
    if total is not None and total != len(devices):
        raise ValueError(f"{strategy} got {len(devices)} devices for replicas={total}; leave one of the two out")
    parsed = [Device.parse(text) for text in devices]  # all of them, so that every rank finds a bad one
    if len(devices) == topology.size and total is None:
        return [parsed[topology.rank]], None
    replicas = Replicas.in_blocks(len(devices), topology)
    return [parsed[replica_id] for replica_id in replicas.ids_here], replicas


def _require_one_node(strategy: str, topology: Topology) -> None:
    if topology.num_nodes > 1:
        nodes = "; ".join(name_ranks(ranks) for ranks in topology.nodes)
        raise TopologyError(
            f"{strategy} is for the ranks of one node, and these are on {topology.num_nodes} nodes ({nodes}); "
            "use MultiWorkerMirroredStrategy"
        )
