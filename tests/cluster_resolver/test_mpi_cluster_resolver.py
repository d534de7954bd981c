"""A cluster made of the ranks of an MPI communicator; any number of ranks."""

import pytest

from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.cluster_resolver.cluster_spec import number_ports
from mpidist.errors import TopologyError


@pytest.mark.ranks(3)
def test_tasks_are_the_ranks_of_the_communicator_in_its_order(comm):
    """No question after the first is collective: one that a rank alone asks must not hang."""
    from mpi4py import MPI

    hosts = comm.allgather(MPI.Get_processor_name())
    backwards = comm.Split(0, comm.size - comm.rank)
    for part, rank in ((comm, comm.rank), (backwards, comm.size - 1 - comm.rank)):
        resolver = MPIClusterResolver(part)
        if part.rank == 0:
            assert (resolver.num_tasks, resolver.rank) == (comm.size, rank)
            resolver.check(comm.size, rank)
        spec = resolver.cluster_spec()
        assert spec.as_dict() == {"worker": number_ports(hosts)}
        assert len(set(spec.job_tasks("worker"))) == comm.size
        if part.rank == 0:
            assert resolver.cluster_spec() is spec
            assert (resolver.task_type, resolver.task_id) == ("worker", rank)
            assert resolver.master() == spec.task_address("worker", rank)
            assert resolver.master("worker", 0, "grpc") == f"grpc://{spec.task_address('worker', 0)}"
    assert backwards.allgather(resolver.master()) == spec.job_tasks("worker")
    backwards.Free()
    with pytest.raises(TopologyError, match=f"MPIClusterResolver has {comm.size} tasks"):
        MPIClusterResolver(comm).check(comm.size + 1, comm.rank)
    assert comm.allreduce(1) == comm.size  # it asked on a duplicate, which is freed
    assert MPIClusterResolver(comm, environ={}).num_accelerators() == {"GPU": 0}
    assert MPIClusterResolver(comm, environ={"CUDA_VISIBLE_DEVICES": "3"}).num_accelerators() == {"GPU": 1}


@pytest.mark.ranks(1, 2)
def test_world_is_the_default():
    from mpi4py import MPI

    resolver = MPIClusterResolver()
    assert (resolver.num_tasks, resolver.rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    assert resolver.cluster_spec().num_tasks("worker") == MPI.COMM_WORLD.size


@pytest.mark.no_mpi
def test_ports_count_up_on_each_host():
    assert number_ports(["b", "a", "b", "b", "a"], 10) == ["b:10", "a:10", "b:11", "b:12", "a:11"]
