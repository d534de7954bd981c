"""A cluster whose tasks are the ranks of an MPI communicator."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec, number_ports
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask
from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.topology import Topology

__all__ = ["MPIClusterResolver"]


@final
class MPIClusterResolver(ClusterResolver):
    """The ranks of a communicator as one job of workers; rank r is worker r.

    MPI needs no addresses. The addresses here are host names with ports that nothing listens on, so that each rank has
    one of its own. The first question starts MPI; the constructor does not.

    Args:
        comm: An intracommunicator of mpi4py; default `MPI.COMM_WORLD`. The resolver does not free `comm`, and sends
            over a duplicate.
        environ: The environment for `num_accelerators`; default `os.environ`.
    """

    def __init__(self, comm: Intracomm | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ=environ)
        self._comm = comm
        self._topology: Topology | None = None

    @classmethod
    def of(cls, topology: Topology) -> MPIClusterResolver:
        """Make the resolver of a strategy's ranks, whose hosts are known: no method is collective."""
        resolver = cls()
        resolver._topology = topology
        resolver._cluster_spec = ClusterSpec({"worker": number_ports(topology.hostnames)})
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Give `{"worker": ["host:port", ...]}` in rank order. Collective at the first call.

        The k-th rank of a host, in rank order, has port 8888 + k. Later calls give the same and send nothing.

        Raises:
            UnavailableError: If no MPI library can be loaded.
        """
        return self._cluster_spec

    @cached_property
    def _cluster_spec(self) -> ClusterSpec:
        private = self._communicator.Dup()
        try:
            hosts = private.allgather(load_mpi().Get_processor_name())
        finally:
            private.Free()
        return ClusterSpec({"worker": number_ports(hosts)})

    def find_own_task(self) -> OwnTask:
        """Take the rank as the index among the workers.

        Raises:
            UnavailableError: If no MPI library can be loaded.
        """
        rank = self._communicator.Get_rank() if self._topology is None else self._topology.rank
        return OwnTask("worker", rank)

    # These two do not read the spec, as ClusterResolver's do: they must not be collective.

    @property
    def num_tasks(self) -> int | None:
        """Number of ranks."""
        return self._communicator.Get_size() if self._topology is None else self._topology.size

    @property
    def rank(self) -> int | None:
        """Index of this process among the workers: its rank, unless `task_id` was set."""
        return self.task_id

    @cached_property
    def _communicator(self) -> Intracomm:
        return load_mpi().COMM_WORLD if self._comm is None else self._comm
