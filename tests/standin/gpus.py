"""What tests of device memory share: CuPy and NCCL, or their stand-in, and arrays that go there and come back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from host_cuda import problems

from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup
from mpidist.transport.nccl import handles as nccl_handles
from standin.nccl import StandIn

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["down", "gpus", "group", "looked_after", "opened", "standin", "up"]

World = TypeVar("World", bound=StandIn)


@contextmanager
def looked_after(world: World, comm: Intracomm) -> Iterator[World]:
    """Let a stand-in serve, and look at whether it was used well."""
    with cuda.provided_by(world.cuda):
        yield world
        gc.collect()
        problems = comm.allgather(world.problems)
        left = comm.allgather(nccl_handles.num_open())
    world.close()
    assert problems == [[]] * comm.size, problems
    assert left == [0] * comm.size


@pytest.fixture
def standin(comm: Intracomm) -> Iterator[StandIn]:
    """CuPy and NCCL on host memory."""
    with looked_after(StandIn(comm), comm) as world:
        yield world


@pytest.fixture(params=["stand-in", pytest.param("GPU", marks=pytest.mark.gpu)])
def gpus(request: pytest.FixtureRequest, comm: Intracomm) -> Iterator[Any]:
    """CuPy with NCCL: the stand-in, or the real CuPy, on GPUs that are real or emulated. Ranks may share them."""
    if request.param == "stand-in":
        yield request.getfixturevalue("standin").cuda
        return
    found = cuda.current()
    reasons = [reason for reason in comm.allgather(found.support.reason) if reason]
    if reasons:
        pytest.skip(f"needs a GPU: {reasons[0]}")
    if os.environ.get("TEST_HOSTIDS") == "1":  # before NCCL's first call: it reads it once
        os.environ["NCCL_HOSTID"] = f"rank{comm.rank}"
    found.cupy.cuda.Device(comm.rank % found.support.num_devices).use()
    yield found
    assert comm.allgather(problems()) == [""] * comm.size


@pytest.fixture(params=["1", "0"], ids=["NCCL", "staged"])
def group(
    request: pytest.FixtureRequest, standin: StandIn, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SyncGroup]:
    """Ranks whose device memory goes by NCCL, or through the host."""
    monkeypatch.setenv("MPIDIST_NCCL", request.param)
    yield from opened(comm)


def opened(comm: Intracomm) -> Iterator[SyncGroup]:
    """Make a group, and close it."""
    made = SyncGroup.from_mpi(comm)
    yield made
    made.close()


def up(numbers: Any) -> Any:
    """Copy numbers to the device."""
    return cuda.current().cupy.asarray(numbers)


def down(array: Any) -> Any:
    """Copy an array to the host."""
    return cuda.current().cupy.asnumpy(array)
