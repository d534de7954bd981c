"""A cluster made of the ranks of an MPI communicator; any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.cluster_resolver.addresses import number_ports
from mpidist.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@pytest.fixture
def world() -> Iterator[Intracomm]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def test_addresses_are_in_rank_order(world: Intracomm) -> None:
    """I32: the resolver TF users asked for; its only attempt put hosts through a set."""
    from mpi4py import MPI

    addresses = MPIClusterResolver(world).cluster_spec().as_dict()
    hosts = world.allgather(MPI.Get_processor_name())
    assert addresses == {"worker": number_ports(hosts)}


def test_order_of_ranks_is_that_of_the_communicator(world: Intracomm) -> None:
    """I32: not that of the world."""
    backwards = world.Split(0, world.size - world.rank)
    try:
        resolver = MPIClusterResolver(backwards)
        assert resolver.rank == world.size - 1 - world.rank
        assert resolver.cluster_spec().num_tasks("worker") == world.size
        assert world.allgather(resolver.master())[::-1] == resolver.cluster_spec().job_tasks("worker")
    finally:
        backwards.Free()


def test_every_rank_has_an_address_of_its_own(world: Intracomm) -> None:
    """I32."""
    addresses = MPIClusterResolver(world).cluster_spec().job_tasks("worker")
    assert len(set(addresses)) == world.size


def test_task_is_the_rank(world: Intracomm) -> None:
    """I32."""
    resolver = MPIClusterResolver(world)
    assert (resolver.task_type, resolver.task_id) == ("worker", world.rank)
    assert (resolver.num_tasks, resolver.rank) == (world.size, world.rank)
    assert resolver.master() == resolver.cluster_spec().task_address("worker", world.rank)
    assert resolver.master("worker", 0, "grpc") == f"grpc://{resolver.cluster_spec().task_address('worker', 0)}"


def test_questions_after_the_first_are_not_collective(world: Intracomm) -> None:
    """A question that one rank alone asks must not hang."""
    resolver = MPIClusterResolver(world)
    first = resolver.cluster_spec()
    if world.rank == 0:
        assert resolver.cluster_spec() is first
        assert resolver.master() == first.task_address("worker", 0)


def test_size_and_rank_are_never_collective(world: Intracomm) -> None:
    """A question that one rank alone asks must not hang."""
    resolver = MPIClusterResolver(world)
    if world.rank == world.size - 1:
        assert (resolver.num_tasks, resolver.rank) == (world.size, world.rank)
        resolver.check(world.size, world.rank)


def test_another_communicator_is_noticed(world: Intracomm) -> None:
    """Style rule 16."""
    with pytest.raises(TopologyError, match=f"MPIClusterResolver says {world.size} tasks"):
        MPIClusterResolver(world).check(world.size + 1, world.rank)


def test_the_users_communicator_stays_usable(world: Intracomm) -> None:
    """Style rule 21: sent on a duplicate, which is freed."""
    MPIClusterResolver(world).cluster_spec()
    assert world.allreduce(1) == world.size


def test_world_is_the_default() -> None:
    """I32."""
    from mpi4py import MPI

    resolver = MPIClusterResolver()
    assert (resolver.num_tasks, resolver.rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    assert resolver.cluster_spec().num_tasks("worker") == MPI.COMM_WORLD.size


def test_gpus_are_those_of_the_environment(world: Intracomm) -> None:
    """X37, X38."""
    assert MPIClusterResolver(world, environ={}).num_accelerators() == {"GPU": 0}
    assert MPIClusterResolver(world, environ={"CUDA_VISIBLE_DEVICES": "3"}).num_accelerators() == {"GPU": 1}


def test_ports_count_up_on_each_host() -> None:
    """T225, ports."""
    assert number_ports(["b", "a", "b", "b", "a"], 10) == ["b:10", "a:10", "b:11", "b:12", "a:11"]
