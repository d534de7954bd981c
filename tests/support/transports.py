"""How ranks reach each other in a test: the transport, and sizes that the cost model would not choose."""

import pytest

from mpidist.context_stack import parts_of
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.shared_memory import schedule

__all__ = [
    "TRANSPORTS", "WAYS_TO_WRITE", "force_way_to_write", "pytest_generate_tests", "set_sizes", "transport",
    "transport_of_case",
]  # fmt: skip

TRANSPORTS = ["mpi", "shared_memory"]
# How compiled code writes memory that other ranks read: in the way that takes less, or always in one of the two.
WAYS_TO_WRITE = ["by trial", "in the caches", "past the caches"]

# All of these modules' tests insist on shared memory, and at 3 ranks are run over messages as well.
_ON_EVERY_TRANSPORT = (
    "test_algorithms",
    "test_gather",
    "test_out",
    "test_results",
    "test_run_and_reduce",
    "test_server_variables",
)


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] not in _ON_EVERY_TRANSPORT:
        return
    if any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return
    if metafunc.definition.get_closest_marker("no_mpi") is None:
        if "transport" not in metafunc.fixturenames:
            metafunc.fixturenames.insert(0, "transport")  # before the strategy is made
        metafunc.parametrize(
            "transport", ["shared_memory", pytest.param("mpi", marks=pytest.mark.ranks(3))], indirect=True
        )


@pytest.fixture
def transport(request, monkeypatch):
    """Set the transport of strategies that the test builds: that of its parameter, if it has one."""
    name = getattr(request, "param", "auto")
    monkeypatch.setenv("MPIDIST_TRANSPORT", name)
    return name


@pytest.fixture(autouse=True)
def transport_of_case(request):
    """Set the transport of a case first: `pytest_generate_tests` comes too late to add a fixture to a test."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "transport" in callspec.params:
        request.getfixturevalue("transport")


def force_way_to_write(strategy, way):
    """Let the compiled code of a strategy on one node write in this one of `WAYS_TO_WRITE`."""
    fused = parts_of(strategy).group.levels.fused
    assert fused is not None
    barrier = fused.slots.barrier
    if hasattr(barrier, "forced_way"):  # not where NumPy is in the place of compiled code
        barrier.forced_way = WAYS_TO_WRITE.index(way) - 1


def set_sizes(
    monkeypatch,
    chunk_bytes=None,  # size of a chunk of fused arrays
    least_bytes=None,  # size from which on arrays are fused across nodes
    one_shot_bytes=None,  # size up to which all ranks of one node add everything themselves
    depth=None,  # number of shards under way between nodes
    fine_count=None,  # number of elements of an average piece from which on pieces are added where they lie
):
    """Let the cost model choose these sizes, for strategies that the test builds."""
    if fine_count is not None:
        monkeypatch.setattr(schedule, "FINE_COUNT", fine_count)
    for name, value in (("chunk_bytes", chunk_bytes), ("one_shot_bytes", one_shot_bytes)):
        if value is not None:
            monkeypatch.setattr(CostModel, name, lambda self, placement, value=value: value)
    for name, value in (("least_bytes", least_bytes), ("depth", depth)):
        if value is not None:  # one node has none
            monkeypatch.setattr(
                CostModel, name, lambda self, placement, value=value: value if len(placement) > 1 else 0
            )
