"""Ranks of a node that share several caches: each byte enters a group of ranks once each way, and sums are right."""

import os
from itertools import product

import numpy as np
import pytest
from support.contributions import have_equal_bits, in_rank_order, list_of_rank
from support.reductions import all_reduce
from support.transports import set_sizes

from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.group.discovery import shared_cache
from mpidist.transport.reduction import UFUNCS, Reduction
from mpidist.transport.shared_memory import fused_reducer, two_shot
from mpidist.transport.waiting import complete

pytestmark = pytest.mark.core

GROUPS = {"0,0,1,1": [[0, 1], [2, 3]], "0,1,0,1": [[0, 2], [1, 3]]}
LENGTHS = [[2048], [0, 5, 0, 640, 1, 1, 1, 130], [7] * 60, [3, 0, 2000, 3]]  # of each array; chunks have 1 KiB


@pytest.fixture(params=GROUPS)
def groups(request, monkeypatch):
    """Let two ranks share a cache, and the other two another one; every list is large enough."""
    set_sizes(monkeypatch, chunk_bytes=1024, one_shot_bytes=0)
    monkeypatch.setattr(fused_reducer, "LEAST_BYTES_OF_GROUPS", 0)
    monkeypatch.setenv("MPIDIST_PRETEND_CACHES", request.param)
    return GROUPS[request.param]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("compiled", ["all", "some", "none"])
def test_cache_groups_are_added_in_order(comm, groups, monkeypatch, compiled):
    """Private arrays, with results new or not, on ranks with and without the compiled part."""
    if compiled == "none" or (compiled == "some" and comm.rank % 2):
        monkeypatch.setattr(two_shot, "native", None)
    with Strategy(comm=comm) as strategy:
        for code, op, lengths in product("fdl", ["SUM", "MEAN", "MAX", "PROD"], LENGTHS):
            if (code, op) == ("l", "MEAN") or (op != "SUM" and ("fdl".index(code) + LENGTHS.index(lengths)) % 2):
                continue  # each operation meets each length, of some dtype
            dtype, ufunc = np.dtype(code), UFUNCS.get(op.lower(), np.add)
            parts = [list_of_rank(rank, lengths, dtype) for rank in range(4)]
            given = parts[comm.rank]
            with np.errstate(all="ignore"):
                sums = [[in_rank_order(ufunc, rows, dtype) for rows in zip(*(parts[at] for at in one), strict=True)]
                        for one in groups]  # fmt: skip
                divisor = 4 if op == "MEAN" else 1
                wanted = [in_rank_order(ufunc, rows, dtype, divisor) for rows in zip(*sums, strict=True)]
            for _ in range(3):  # new results lie in shared memory from the second call on
                assert have_equal_bits(all_reduce(strategy, op, given), wanted), (code, op, lengths)
            elsewhere = [np.empty_like(part) for part in given]
            assert have_equal_bits(all_reduce(strategy, op, given, out=elsewhere), wanted)
            transposed = [np.stack([part, part])[:, ::-1].T for part in given]  # NumPy adds these
            others = all_reduce(strategy, op, transposed if comm.rank else [part.copy() for part in transposed])
            assert have_equal_bits([other[::-1, 1] for other in others], wanted)
            shared = strategy.symmetric_empty_like(given)
            for array, part in zip(shared, given, strict=True):
                array[...] = part
            targets = strategy.symmetric_empty_like(given)
            for out in (given, targets, shared):
                assert have_equal_bits(all_reduce(strategy, op, given if out is given else shared, out=out), wanted)
            comm.Barrier()  # before the shared arrays go


@pytest.mark.ranks(4)
@pytest.mark.parametrize("compiled", ["all", "none"])
def test_cache_groups_are_entered_once_each_way(comm, groups, monkeypatch, compiled):
    if compiled == "none":
        monkeypatch.setattr(two_shot, "native", None)
    with Strategy(comm=comm) as strategy:
        reducer = parts_of(strategy).group.levels.fused
        for count in (1, 100, 5000):
            buffer = np.full(count, comm.rank, np.float32)
            transfer = reducer.two_shot(two_shot.FusedArrays(buffer.dtype, [buffer], [buffer]), Reduction())
            reducer.run(transfer)
            entered = comm.allgather(transfer.entered + (transfer.compiled.entered if transfer.compiled else 0))
            assert [sum(entered[rank] for rank in group) for group in groups] == [buffer.nbytes] * 2
            assert (buffer == 6).all()
            (shared,) = strategy.symmetric_empty_like([buffer])
            shared[...] = comm.rank
            places = parts_of(strategy).group.shared.places([shared])
            in_place = reducer.in_place(
                parts_of(strategy).group.shared.runs(places, places, shared.dtype), Reduction(), 1
            )
            complete(in_place.steps(has_passed_barrier=False), reducer.check_peers)
            entered = comm.allgather(in_place.entered)
            assert [sum(entered[rank] for rank in group) for group in groups] == [buffer.nbytes] * 2
            assert (shared == 6).all()
            comm.Barrier()


@pytest.mark.ranks(4)
def test_cache_groups_leave_promised_orders_alone(comm, groups):
    """One rounding of half precision, and results that do not depend on places."""
    with Strategy(comm=comm) as strategy:
        for code, options in (("e", None), ("f", CommunicationOptions(reproducible=True))):
            dtype = np.dtype(code)
            rows = [list_of_rank(rank, [3000], dtype)[0] for rank in range(4)]
            result = all_reduce(strategy, "SUM", rows[comm.rank], options=options)
            assert have_equal_bits([result], [in_rank_order(np.add, rows, dtype)])


@pytest.mark.no_mpi
def test_cache_groups_of_uneven_sizes(job):
    """Some ranks of the larger group only copy."""
    program = """
import numpy as np

import mpidist
from mpidist.transport.shared_memory import fused_reducer

fused_reducer.LEAST_BYTES_OF_GROUPS = 0
with mpidist.MultiWorkerMirroredStrategy() as strategy:
    for count in (1, 5000, 300_001) * 2:
        mine = np.arange(count) + strategy.rank
        total = strategy.reduce("sum", mine)
        assert (total == 7 * np.arange(count) + 21).all()
    if strategy.is_chief:
        print("added")
"""
    ended = job(program, ranks=7, head="", MPIDIST_PRETEND_CACHES="0,0,0,1,1,2,2")
    assert (ended.status, ended.out) == (0, "added\n"), ended.err


@pytest.mark.no_mpi
def test_cache_is_named_where_all_processors_share_it(tmp_path):
    for index, (level, shared) in enumerate([(1, "2"), (3, "0-3,8"), (2, "2-3")]):
        folder = tmp_path / "cpu2" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(f"{level}\n")
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert shared_cache([2], tmp_path) == shared_cache([2, 3, 8], tmp_path) == "0-3,8"
    assert shared_cache([2, 4], tmp_path) == shared_cache([5], tmp_path) == shared_cache([], tmp_path) == ""
    assert shared_cache() == shared_cache(os.sched_getaffinity(0))
