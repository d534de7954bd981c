"""Pretended nodes: the same ranks, placed on nodes in every way that has ever broken a hierarchy."""

import pytest

__all__ = ["PLACEMENTS", "one_and_two_nodes", "placement"]

# Name -> node of a rank, for any number of ranks. With 4 ranks: 4, 2+2, 3+1, 1+1+2, and 2+2 dealt out in turn.
PLACEMENTS = {
    "one node": lambda rank, size: 0,
    "even": lambda rank, size: 2 * rank // size,
    "uneven": lambda rank, size: int(rank == size - 1),
    "growing": lambda rank, size: min(rank, 2),
    "cyclic": lambda rank, size: rank % 2,
}


# From how many ranks on a placement is none of those before it.
_NEW_FROM = {"one node": 1, "even": 2, "uneven": 4, "growing": 3, "cyclic": 3}


# For a property that does not depend on how ranks are placed, but on whether there are messages between nodes.
one_and_two_nodes = pytest.mark.parametrize(
    "placement",
    [pytest.param("one node", marks=pytest.mark.ranks(2)), pytest.param("uneven", marks=pytest.mark.ranks(3))],
    indirect=True,
)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.ranks(min=_NEW_FROM[name])) for name in PLACEMENTS])
def placement(request, monkeypatch):
    """Place the ranks of the world on pretended nodes, for strategies that the test builds."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.Get_size()
    nodes = tuple(PLACEMENTS[request.param](rank, size) for rank in range(size))
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, nodes)))
    return nodes
