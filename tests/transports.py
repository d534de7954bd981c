"""How ranks reach each other in a test: the transport, and sizes that the cost model would not choose."""

from __future__ import annotations

import pytest

from mpidist.transport.cost_model import CostModel

__all__ = ["TRANSPORTS", "set_sizes", "transport"]

TRANSPORTS = ["mpi", "shared_memory"]


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the transport of strategies that the test builds: that of its parameter, if it has one."""
    name: str = getattr(request, "param", "auto")
    monkeypatch.setenv("MPIDIST_TRANSPORT", name)
    return name


def set_sizes(
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int | None = None,
    least_bytes: int | None = None,
    one_round_bytes: int | None = None,
    depth: int | None = None,
) -> None:
    """Let the cost model choose these sizes, for strategies that the test builds.

    Args:
        monkeypatch: Puts everything back.
        chunk_bytes: Size of a chunk of a stream.
        least_bytes: Size from which on streams are used across nodes.
        one_round_bytes: Size up to which all ranks of one node add everything themselves.
        depth: Number of shards under way between nodes.
    """
    for name, value in (("chunk_bytes", chunk_bytes), ("one_round_bytes", one_round_bytes)):
        if value is not None:
            monkeypatch.setattr(CostModel, name, lambda self, placement, value=value: value)
    for name, value in (("least_bytes", least_bytes), ("depth", depth)):
        if value is not None:  # one node has none
            monkeypatch.setattr(
                CostModel, name, lambda self, placement, value=value: value if len(placement) > 1 else 0
            )
