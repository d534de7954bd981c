"""The GPUs of one process: added in the order of a tree, and copied to each other, by NCCL."""

import gc
import os
import weakref
from itertools import product

import numpy as np
import pytest
from host_cuda.emulated import HANGS
from host_cuda.gpus import compiler, down, emulated, gpus, require_gpus, up
from support.contributions import bits

from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.transport import cuda
from mpidist.transport.arrays import current_gpu
from mpidist.transport.gpu.background import Background
from mpidist.transport.nccl import gpus_of_process
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.gpus_of_process import GpusOfProcess
from mpidist.transport.tree import Fold
from mpidist.transport.waiting import Patience

__all__ = ["compiler", "emulated", "gpus"]

pytestmark = pytest.mark.ranks(1)

SHARES_GPUS = 23003  # the first NCCL with several communicators of one process on one GPU, if it is told so
FOLDS = [Fold(2, [[0], [1]]), Fold(3, [[0], [1], [2]]), Fold(8, [[1], [2], [3]])]  # to two rows: 1, and 2 + 3


@pytest.fixture(params=["a GPU each", "one GPU"])
def make(request, gpus):
    """Makes the GPUs of a process, so many, and frees them."""
    made = []
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and gpus.support.nccl_version >= SHARES_GPUS
    if request.param == "one GPU" and not shares:
        pytest.skip("needs a GPU with NCCL 2.30.3 or later, and NCCL_MULTI_RANK_GPU_ENABLE=1")

    def several(count):
        indices = list(range(count)) if request.param == "a GPU each" else [0] * count
        require_gpus(indices[-1] + 1)
        gpus.cupy.cuda.Device(0).use()
        made.append(GpusOfProcess(indices, Patience()))
        return made[-1], indices

    yield several
    for one in made:
        one.free()


def put(gpus, index, numbers):
    """Copy numbers to a GPU, and do not wait for that."""
    gpus.cupy.cuda.Device(index).use()
    array = up(numbers)
    gpus.cupy.cuda.Device(0).use()
    return array


@pytest.mark.parametrize("fold", FOLDS, ids=lambda its: f"{its.num_parts} to {its.num_rows}")
def test_arrays_are_added_in_the_order_of_the_tree_and_broadcast(make, gpus, fold):
    """From any layout: public calls pass one array after the other where they can."""
    its, indices = make(fold.num_parts)
    rng = np.random.default_rng(fold.num_parts)
    for dtype, sizes in product(("f4", "f2", "i2"), ([7], [3, 0, 2], [0])):
        wire = np.dtype("f4" if dtype == "f2" else dtype)
        whole = [[(rng.normal(size=2 * size) * 1000).astype(dtype) for size in sizes] for _ in indices]
        expected = [np.empty(sum(sizes), wire) for _ in range(fold.num_rows)]
        fold.combine(np.add, [np.concatenate([array[::2] for array in own]).astype(wire) for own in whole], expected)
        parts = [[put(gpus, index, array)[::2] for array in own] for index, own in zip(indices, whole, strict=True)]
        rows = [put(gpus, 0, np.zeros_like(row)) for row in expected]
        copies = [[put(gpus, index, np.zeros_like(row)) for row in expected] for index in indices[1:]]
        its.add(fold, np.add, parts, rows)
        its.broadcast(rows, copies)
        for got in (rows, *copies):
            assert [bits(down(row)) for row in got] == [bits(row) for row in expected], (dtype, sizes)


@pytest.mark.parametrize(("read", "added"), [("f8", "f8"), ("f2", "f4"), ("i2", "i4")])
def test_all_kernels_of_sums_are_compiled_before(compiler, make, gpus, read, added):
    """While no deadline runs: also those of long lists, and of what CuPy has cast, as it has kernels of its own."""
    its, indices = make(2)
    its.compile(FOLDS[0], np.add, np.dtype(read), 200, np.dtype(added))
    compiler.compiled.clear()
    for number in (2, 200):
        parts = [[put(gpus, index, np.ones(5, read)) for _ in range(number)] for index in indices]
        its.add(FOLDS[0], np.add, parts, [row := put(gpus, 0, np.zeros(5 * number, added))])
        assert (down(row) == 2).all()
    assert compiler.compiled == set()


def test_nccl_connects_at_the_start_without_the_variable(make, monkeypatch):
    """In the first calls it would wait without a deadline."""
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)
    make(2)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    make(2)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "1"


def test_work_in_a_thread_is_on_the_device_that_was_current(gpus):
    require_gpus(2)
    with gpus.cupy.cuda.Device(1):
        work = Background("a test", current_gpu)
    assert work.wait() == 1


@pytest.mark.parametrize(
    ("call", "status", "kind"),
    [("send of rank 2", 1, UnavailableError), ("an error of NCCL", 6, PeerFailedError), ("an abort", 0, RuntimeError)],
)
def test_error_of_nccl_ends_the_communicators(gpus, emulated, monkeypatch, call, status, kind):
    """Of a call, in work that was launched, and of another thread."""
    before = gpus.cupy.cuda.get_current_stream()
    its = GpusOfProcess([0, 1, 2], Patience())
    rows = []

    def add():
        parts = [[put(cuda.current(), index, np.ones(9))] for index in range(3)]
        row = put(cuda.current(), 0, np.zeros(9))
        rows.append(weakref.ref(row))
        its.add(FOLDS[1], np.add, parts, [row])

    def abort_all(*_):
        nccl_handles.abort_all(LookupError("in a test"))
        return True  # as the GPUs are done then

    add()
    emulated.hold()
    emulated.wish(call, status)
    with monkeypatch.context() as patch:
        if call == "an abort":
            patch.setattr(gpus_of_process, "is_complete", abort_all)
        with pytest.raises(kind, match=r"a sum over GPUs 0, 1, 2 of one process.*(failed: NCCL_ERROR|in a test)"):
            add()
    gc.collect()
    assert rows[1]() is not None, "whom a GPU writes, when it comes to that"
    emulated.be_normal()
    assert gpus.cupy.cuda.runtime.getDevice() == 0
    assert gpus.cupy.cuda.get_current_stream() == before
    with pytest.raises(RuntimeError, match="cannot be used any more, because an earlier call failed"):
        add()
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 3)]


@pytest.mark.parametrize(
    ("kind", "text", "seconds"),
    [
        (UnavailableError, "could not be started on GPUs 0, 1 of one process: NCCL's start did not", 0.3),
        (KeyboardInterrupt, None, 600.0),
    ],
)
def test_hanging_start_is_given_up_and_aborted_later(emulated, monkeypatch, kind, text, seconds):
    monkeypatch.setattr(nccl_handles, "START_SECONDS", seconds)
    emulated.wish("ncclCommInitRank", HANGS)
    if kind is KeyboardInterrupt:
        emulated.interrupt_in("ncclCommInitRank")
    with pytest.raises(kind, match=text):
        GpusOfProcess([0, 1], Patience())
    emulated.be_normal()
    emulated.wait_for_end()
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 2)]


def test_failed_start_destroys_no_communicator(emulated):
    """NCCL may wait without end for communicators of which it has made some, when they are destroyed."""
    emulated.wish("ncclGroupEnd", 2)
    with pytest.raises(UnavailableError, match="could not be started on GPUs 0, 1 of one process: NCCL_ERROR"):
        GpusOfProcess([0, 1], Patience())
    gc.collect()
    assert emulated.calls("destroyed alone") == []


@pytest.mark.parametrize(("stall", "timeout"), [(0.0, 0.2), (0.1, 0.0), (0.1, 0.4)])
def test_hanging_broadcast_over_gpus_warns_and_is_given_up(emulated, monkeypatch, caplog, stall, timeout):
    its = GpusOfProcess([0, 1], Patience(stall, timeout))

    def broadcast():
        its.broadcast([put(cuda.current(), 0, np.ones(9))], [[put(cuda.current(), 1, np.zeros(9))]])

    broadcast()
    real = gpus_of_process.is_complete

    def told():
        return sum("over GPUs 0, 1 of one process has taken" in record.message for record in caplog.records)

    def is_complete(*given):  # where there is no deadline, once people were told
        return not timeout and told() > 0 and real(*given)

    monkeypatch.setattr(gpus_of_process, "is_complete", is_complete)
    if timeout:
        with pytest.raises(DeadlineExceededError, match=r"a broadcast over GPUs 0, 1 .* did not end within 0\.[24] s"):
            broadcast()
        nccl_handles.wait_for_endings()
        ended = emulated.ended()
        assert ({what for what, _ in ended}, sum(number for _, number in ended)) == ({"abort"}, 2)
    else:
        broadcast()
        its.free()
    assert told() == (1 if stall and not timeout else 0), caplog.text
