"""Fixtures of a GPU that is late in everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup
from standin.gpus import gpus, looked_after, opened
from standin.overlap import LateStandIn

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "gpus", "standin"]


@pytest.fixture
def standin(comm: Intracomm) -> Iterator[LateStandIn]:
    """CuPy and NCCL on host memory, late in everything, and a look at whether they were used well."""
    with looked_after(LateStandIn(comm), comm) as world:
        yield world
    assert world.threads <= {threading.get_ident()}


@pytest.fixture
def anywhere(gpus: cuda.Cuda, comm: Intracomm, placement: tuple[int, ...]) -> Iterator[SyncGroup]:
    """Ranks on every placement."""
    yield from opened(comm)
