"""The variables that torchrun sets, from MPI: where torch looks for its rank, and for the store of all ranks."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from mpidist.transport.group.service_group import meet_ranks
from mpidist.transport.mpi.library import load_mpi, ranks_of_node

__all__ = ["check_numbers", "set_environment"]

_stores: list[Any] = []  # rank 0 serves its store until the program ends


def set_environment() -> None:
    """Set the variables that `init_process_group` reads, unless `RANK` is set. Collective over all ranks of the job."""
    if "RANK" in os.environ:
        return
    world, _ = meet_ranks(None, None)
    node = ranks_of_node(world)
    address = None
    if world.rank == 0:
        host = "127.0.0.1" if len(node) == world.size else socket.gethostname()
        # many tenants: `init_process_group`, which opens a store at the address on rank 0, is given this one
        _stores.append(dist.TCPStore(host, 0, world.size, True, wait_for_workers=False, multi_tenant=True))
        address = host, _stores[0].port
    host, port = world.bcast(address)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(node.index(world.rank)),
        LOCAL_WORLD_SIZE=str(len(node)),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )


def check_numbers(rank: int = -1, world_size: int = -1) -> None:
    """Refuse the numbers given to `init_process_group`, or else in the environment, that are not those of MPI. Local.

    Before torch waits for as many processes.
    """
    world = load_mpi().COMM_WORLD
    rank = int(os.environ.get("RANK", world.rank)) if rank < 0 else rank
    size = int(os.environ.get("WORLD_SIZE", world.size)) if world_size < 0 else world_size
    if (rank, size) == (world.rank, world.size):
        return
    others = f"; `mpidist run -n {size}` starts {size} ranks, and torchrun and torch.multiprocessing.spawn start none"
    raise ValueError(
        f"torch takes this process for rank {rank} of {size}, and MPI for {world.rank} of {world.size}: leave RANK and "
        f"WORLD_SIZE unset, or give the numbers of MPI{others if size > world.size else ''}"
    )
