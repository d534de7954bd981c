"""Communicators of a part of a group's ranks: those of a node, and one rank of every node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from mpidist.transport.mpi.library import Intracomm
from mpidist.transport.topology import Topology

__all__ = ["across_nodes", "on_node", "within_node"]


def within_node(comm: Intracomm, topology: Topology) -> Intracomm | None:
    """Make a communicator of the ranks of this rank's node, in rank order; `None` for a single rank. Collective."""
    if topology.size > 1 == topology.num_nodes:  # a duplicate takes half the messages of a split
        return comm.Dup()
    return _split(comm, topology.node, topology.rank) if max(topology.node_sizes) > 1 else None


def across_nodes(comm: Intracomm, topology: Topology) -> Intracomm | None:
    """Make a communicator of the ranks with this local rank, in order of nodes; `None` for an only one. Collective."""
    return _split(comm, topology.local_rank, topology.node) if topology.num_nodes > 1 else None


@contextmanager
def on_node(comm: Intracomm, topology: Topology) -> Iterator[Intracomm | None]:
    """Let the body exchange messages with the ranks of this rank's node: as `within_node`, but free it. Collective."""
    if topology.size > 1 == topology.num_nodes:
        yield comm
        return
    node = within_node(comm, topology)
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
