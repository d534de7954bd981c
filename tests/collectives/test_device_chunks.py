"""Calls with arrays of device memory: how many kernels they launch, and that the numbers are those of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, group, up
from support.contributions import COMPLEX, HALVES, INTEGERS, bits, contribution

from mpidist.collectives import reductions
from mpidist.cross_device_ops import HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.options import CommunicationOptions
from mpidist.transport import library_of
from mpidist.transport.group import SyncGroup, levels

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus", "group"]  # fixtures

F32 = np.dtype(np.float32)
DTYPES = [*INTEGERS, *HALVES, F32, np.dtype(np.float64), *COMPLEX[:2]]
SIZES = (1, 0, 40, 9000, 3)


def launches(group: SyncGroup) -> int:
    return group.levels_of(True).kernels.num_launches


@pytest.mark.parametrize("num_packs", [0, 1, 3])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX", "PROD"])
def test_results_are_those_of_host_memory(group: SyncGroup, comm: Intracomm, op: str, num_packs: int) -> None:
    """Of every dtype, in one call; some arrays are not contiguous."""
    ops = NcclAllReduce(num_packs).bound_to(group)
    kind = {"MEAN": "sum"}.get(op, op.lower())
    dtypes = [dtype for dtype in DTYPES if dtype.kind != "c" or op != "MAX"]
    host = [contribution(kind, comm.rank, size, dtype) for dtype in dtypes for size in SIZES]
    host += [contribution(kind, comm.rank, 24, F32).reshape(4, 6), np.asarray(contribution(kind, comm.rank, 1, F32)[0])]
    on_host = ops.all_reduce(op, host)
    device = [up(its) for its in host]
    device[-2] = up(np.ascontiguousarray(host[-2].T)).swapaxes(0, 1)
    for its, wanted in zip(ops.all_reduce(op, device), on_host, strict=True):
        assert its.dtype == wanted.dtype
        assert its.shape == wanted.shape
        assert bits(down(its)) == bits(wanted), its.dtype


def test_a_pack_takes_a_launch_to_fill_and_a_launch_to_empty(group: SyncGroup, comm: Intracomm) -> None:
    ops = HierarchicalCopyAllReduce().bound_to(group)
    arrays = [up(contribution("sum", comm.rank, 10 + at, F32)) for at in range(161)]
    for op in ("SUM", "MEAN"):
        for _ in range(2):
            before = launches(group)
            ops.all_reduce(op, arrays)
            assert launches(group) - before == (2 if comm.size > 1 else 1), op  # one rank alone copies


def test_arrays_that_come_again_are_looked_at_once(
    group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are and whether they can take results: for a list of gradients this is most of the host's time."""
    ops, numbers = NcclAllReduce().bound_to(group), [up(np.ones(count)) for count in (5, 9)]
    outs = [up(np.ones(count)) for count in (5, 9)]
    ops.all_reduce("SUM", numbers, out=outs)
    looks: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(library_of(numbers[0])), "owns", lambda self, value: looks.append("whose is it?") or True)
        check = reductions.CheckedOuts.__init__
        patch.setattr(reductions.CheckedOuts, "__init__", lambda *these: looks.append("can it be?") or check(*these))
        ops.all_reduce("SUM", numbers, out=outs)
        assert looks == []
        ops.all_reduce("SUM", numbers, out=[up(np.ones(count)) for count in (5, 9)])
        assert looks.count("can it be?") == 1, "others are looked at"
    assert all((down(out) == comm.size).all() for out in outs)


@pytest.mark.ranks(min=2)
def test_large_arrays_are_copied_in_one_launch_and_divided_in_one(
    group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_DIRECT_BYTES_OF_DEVICE", 1 << 12)
    ops = HierarchicalCopyAllReduce().bound_to(group)
    host = [contribution("sum", comm.rank, size, F32) for size in (5000, 7, 6000, 1024, 8)]
    arrays = [up(its) for its in host]
    results = ops.all_reduce("SUM", arrays)
    before = launches(group)
    means = ops.all_reduce("MEAN", arrays)
    assert launches(group) - before == 1 + 2 + 1
    before = launches(group)
    ops.all_reduce("SUM", arrays, out=results)
    assert launches(group) - before == 1 + 2
    before = launches(group)
    ops.all_reduce("SUM", results, out=results)
    assert launches(group) - before == 2, "in place"
    for its, mean in zip(host, means, strict=True):
        assert (down(mean) == sum(comm.allgather(its)) / np.float32(comm.size)).all()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_numbers_are_compressed_as_they_are_packed(group: SyncGroup, comm: Intracomm, compression: str) -> None:
    ops = HierarchicalCopyAllReduce().bound_to(group)
    options = CommunicationOptions(compression=compression, compress_everywhere=True)
    joins = group.levels_of(True).nccl is levels.NcclReach.WORLD  # what NCCL carries, of half precision
    host = [contribution("sum", comm.rank, size, F32) + np.float32(1e-4 * comm.rank) for size in (40, 5000, 3)]
    for op in ("SUM", "MEAN"):
        on_host = ops.all_reduce(op, host, options)
        before = launches(group)
        on_device = ops.all_reduce(op, [up(its) for its in host], options)
        assert launches(group) - before == 2 + joins
        for its, wanted in zip(on_device, on_host, strict=True):
            assert its.dtype == F32
            assert bits(down(its)) == bits(wanted)
