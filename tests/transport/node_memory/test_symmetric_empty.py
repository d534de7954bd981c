"""Arrays in memory that all ranks of a node reach: one for each rank, or one for the node."""

import errno
import mmap
import os
import weakref
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.reductions import all_reduce
from support.used import Used

import mpidist
from mpidist import MultiWorkerMirroredStrategy
from mpidist.errors import UnavailableError

WORLD = MPI.COMM_WORLD


@pytest.mark.ranks(2)
def test_array_is_an_ordinary_one(strategy):
    shapes = [(), 0, 5, (2, 3), [2, 3], (0, 4), np.int64(3)]
    for shape, dtype, per_node in product(shapes, ("float32", np.dtype(np.complex128), bool), (False, True)):
        array = strategy.symmetric_empty(shape, dtype, per_node=per_node)
        assert type(array) is np.ndarray
        assert array.shape == np.empty(shape).shape
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable


@one_and_two_nodes
@pytest.mark.core
def test_ranks_of_a_node_share_one(placement):
    with MultiWorkerMirroredStrategy() as strategy:
        array = strategy.symmetric_empty((2, 2), np.int64, per_node=True)
        WORLD.Barrier()
        if strategy.topology.is_leader:
            array[...] = 7 + placement[WORLD.rank]
        WORLD.Barrier()
        assert array.tolist() == [[7 + placement[WORLD.rank]] * 2] * 2


@pytest.mark.core
@one_and_two_nodes
def test_want_of_memory_on_one_node_is_the_error_of_all(placement, monkeypatch):
    """And nothing is left of it: later arrays have the same places everywhere."""

    def fail(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def allocate(what):
        if what == "variable":
            with strategy.scope():
                mpidist.Variable(np.zeros(100_000))
        else:
            strategy.symmetric_empty(100_000, np.float64, per_node=what == "per node")

    with MultiWorkerMirroredStrategy(per_node_variables=True) as strategy:
        for what in ("per rank", "per node", "variable"):
            with monkeypatch.context() as patch:
                if WORLD.rank == WORLD.size - 1:
                    patch.setattr(os, "posix_fallocate", fail)
                    patch.setattr(mmap, "mmap", fail)
                call = "placing of a variable" if what == "variable" else "symmetric_empty"
                text = rf"{call} on node {placement[-1]} \(.*\): 78\d.* KiB .*cannot be had .*Cannot allocate memory"
                with raises_everywhere(WORLD, UnavailableError, text):
                    allocate(what)
            array, out = (strategy.symmetric_empty(1000, np.float64, per_node=per_node) for per_node in (False, True))
            array[...] = 1
            assert (all_reduce(strategy, "SUM", array, out=out) == WORLD.size).all()
            assert strategy.reduce("SUM", 1) == WORLD.size


@pytest.mark.ranks(2)
def test_nest_of_arrays_keeps_its_form(strategy):
    like = {"w": np.ones((2, 3), np.float16), "b": [np.arange(4), np.float32(1)], "n": (2, 1.5)}
    for per_node in (False, True):
        made = strategy.symmetric_empty_like(like, per_node=per_node)
        assert (made["w"].shape, made["w"].dtype) == ((2, 3), np.float16)
        assert [(array.shape, array.dtype) for array in made["b"]] == [((4,), np.int64), ((), np.float32)]
        assert [(array.shape, array.dtype) for array in made["n"]] == [((), np.int64), ((), np.float64)]
        assert isinstance(made["b"], list)
        assert isinstance(made["n"], tuple)
        assert all_reduce(strategy, "SUM", like, out=made) is made
        assert (made["b"][0] == WORLD.size * np.arange(4)).all()
    foreign = np.arange(3).astype(np.dtype(np.int32).newbyteorder("S"))
    array = strategy.symmetric_empty_like(mpidist.PerReplica((foreign,)))
    assert array.dtype == np.int32
    assert array.dtype.isnative


IMPOSSIBLE = [
    ((2, -1), "f4", ValueError, r"the lengths in the shape must be 0 or more, got \(2, -1\)"),
    (2, object, ValueError, "ranks cannot share Python objects, got dtype object; pass one of numbers"),
    (1 << 60, "f4", ValueError, "dtype float32 is larger than any memory; ask for less"),
    (2, "nonsense", TypeError, "the dtype must be one of NumPy's, as 'float32', got 'nonsense'"),
    (2, 32, TypeError, "the dtype must be one of NumPy's, as 'float32', got 32"),
    *((shape, "f4", TypeError, "the shape must be a whole") for shape in ("a", 3.5, (3, "2"), None)),
]


@pytest.mark.ranks(2)
def test_impossible_array_is_refused(strategy):
    for shape, dtype, kind, text in IMPOSSIBLE:
        for per_node in (False, True):
            with raises_everywhere(WORLD, kind, f"^symmetric_empty: .*{text}"):
                strategy.symmetric_empty(shape, dtype, per_node=per_node)
    assert strategy.reduce("SUM", 1) == WORLD.size


@pytest.mark.core
@pytest.mark.ranks(2)
def test_memory_of_reduced_arrays_is_given_back_with_them(strategy):
    """Also of lists, which calls remember to be faster the next time."""
    for per_node, count, is_value in product((False, True), (5, 40_000), (False, True)):
        own = [np.ones(count, np.float32), np.ones(3, np.float32)]
        for step in range(3):
            if step == 1:
                before = Used.now().mapped
            for values in own[0], own:
                shared = strategy.symmetric_empty_like(values, per_node=per_node)
                seen = weakref.ref(shared[0] if isinstance(shared, list) else shared)
                for _ in range(2):
                    all_reduce(strategy, "SUM", shared if is_value else values, out=values if is_value else shared)
                    all_reduce(strategy, "SUM", shared, out=shared)
                del shared
                assert seen() is None
            for value in own:
                value[...] = 1
        assert Used.now().mapped <= before


@one_and_two_nodes
def test_symmetric_empty_per_node_is_reserved_once(placement, monkeypatch):
    lengths = []
    really = os.posix_fallocate

    def reserve(file, start, length):
        lengths.append(length)
        really(file, start, length)

    with MultiWorkerMirroredStrategy() as strategy:
        monkeypatch.setattr(os, "posix_fallocate", reserve)
        for per_node, nbytes in product((False, True), (1, 5 << 20)):
            lengths.clear()
            array = strategy.symmetric_empty(nbytes, np.uint8, per_node=per_node)
            assert not array.any()
            node = strategy.topology.node
            of_node = [count for at, count in WORLD.allgather((node, sum(lengths))) if at == node]
            if len(of_node) > 1:  # the memory of a rank alone is no file
                times = 1 if per_node else len(of_node)
                assert sum(of_node) == times * -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if per_node:
                assert max(of_node) - min(of_node) <= mmap.PAGESIZE  # each rank its share
                strategy.broadcast(np.full(nbytes, 7, np.uint8), out=array)
                assert (array == 7).all()


@pytest.mark.core
@pytest.mark.ranks(3)
def test_ranks_may_let_go_of_arrays_at_other_times(strategy):
    kept = []
    for per_node, count, step in product((False, True), (3, 300_000), range(3)):
        value = strategy.symmetric_empty(count, np.float32)
        out = strategy.symmetric_empty(count, np.float32, per_node=per_node)
        value[...] = WORLD.rank + step
        all_reduce(strategy, "SUM", value, out=out)
        assert (out == sum(range(WORLD.size)) + step * WORLD.size).all()
        WORLD.Barrier()
        if WORLD.rank % 2 == 0:
            kept += [value, out]
    del value, out
    private = np.ones(count, np.float32)
    all_reduce(strategy, "SUM", private, out=private)
    assert (private == WORLD.size).all()
