"""All-reduces of given arrays that are checked once: `Strategy.all_reduce_init`."""

import threading
import weakref
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.placements import PLACEMENTS
from support.reductions import all_reduce, are_repeated
from support.replicas import inside
from support.used import are_gone, least_called

import mpidist
from mpidist import CommunicationOptions as Options
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport.host_memory.result_memory import RecycledResults
from mpidist.transport.native.loading import native

pytestmark = pytest.mark.core


@pytest.fixture(params=["one node", "even"])
def strategy(comm, request, monkeypatch):
    """A strategy on one node and on two."""
    nodes = [PLACEMENTS[request.param](rank, comm.size) for rank in range(comm.size)]
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, nodes)))
    with Strategy(comm=comm) as made:
        yield made


on_one_node = pytest.mark.parametrize("strategy", ["one node"], indirect=True)


def total(comm, step):
    """Add `step * (rank + 1)` of all ranks."""
    return step * comm.size * (comm.size + 1) // 2


# Nests of arrays, as a function of a strategy.
VALUES = {
    "small": lambda strategy: np.empty(5),
    "large": lambda strategy: np.empty((64, 1024), np.float32),
    "Fortran": lambda strategy: np.empty((64, 1024), order="F"),
    "strided": lambda strategy: np.empty((64, 1024))[:, ::2],
    "big-endian": lambda strategy: np.empty(5, ">f8"),
    "empty": lambda strategy: np.empty((0, 3)),
    "list": lambda strategy: [np.empty((7, 9)), np.empty(20_000)],
    "small list": lambda strategy: [np.empty(3), np.empty(())],
    "two dtypes": lambda strategy: {"b": np.empty(20_000, np.float32), "a": (np.empty(9), [np.empty(4)])},
    "symmetric": lambda strategy: strategy.symmetric_empty((64, 1024), float),
    "symmetric list": lambda strategy: strategy.symmetric_empty_like([np.empty(9), np.empty(20_000)]),
}


@pytest.mark.ranks(1, 2, 3)
def test_persistent_all_reduce_sums_current_values(strategy, comm):
    """Into new arrays, in place, and into others; called and started, in `run` and outside, in turn."""
    ways = [
        lambda call: call(),
        lambda call: strategy.run(call),
        lambda call: call.start().wait(),
        lambda call: strategy.run(call.start).wait(),
    ]
    for kind, make in VALUES.items():
        value = make(strategy)
        leaves, form = mpidist.nest.flatten(value)
        outs = None, value, mpidist.nest.map_structure(np.empty_like, value)
        calls = [(strategy.all_reduce_init(value, "sum", out=out), out) for out in outs]
        before = []
        for step, (call, out) in product(range(1, 13), calls):
            comm.Barrier()  # others may have written the twin of a symmetric array
            for at, leaf in enumerate(leaves):
                leaf[...] = step * (comm.rank + 1) + at
            result = ways[step // 3 % 4](call)
            assert out is None or result is out, kind
            results, its_form = mpidist.nest.flatten(result)
            assert its_form == form, kind
            for at, (one, leaf) in enumerate(zip(results, leaves, strict=True)):
                assert (one == total(comm, step) + at * comm.size).all(), (kind, step, at)
                assert (one.shape, one.dtype.kind) == (leaf.shape, leaf.dtype.kind), kind
            if out is None:  # no later call has changed them
                assert all((one == total(comm, step - 1) + at * comm.size).all() for at, one in enumerate(before)), kind
                before = results


@pytest.mark.ranks(1, 3)
def test_persistent_all_reduce_takes_arguments_of_all_reduce(strategy, comm):
    number, mean = strategy.all_reduce_init([2.5, np.float32(1)]), strategy.all_reduce_init(np.full(3, 4), "mean")
    options = Options(timeout_seconds=600, bytes_per_pack=100, reproducible=True)
    largest = strategy.all_reduce_init({"a": np.full(300, comm.rank)}, mpidist.ReduceOp.MAX, options)
    for _ in range(3):
        assert number() == [2.5 * comm.size, comm.size]
        assert mean().dtype == np.float64
        assert (mean() == 4).all()
        assert (largest()["a"] == comm.size - 1).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shape", [(5,), (1 << 16,)])
def test_persistent_all_reduce_meets_the_ordinary_call(strategy, comm, shape):
    value = np.empty(shape)
    called, listed = strategy.all_reduce_init(value, out=value), strategy.all_reduce_init([value])
    for step in range(1, 9):
        is_persistent = comm.rank == step % comm.size
        value[...] = step * (comm.rank + 1)
        result = called() if is_persistent else all_reduce(strategy, "sum", value, out=value)
        assert (result == total(comm, step)).all()
        (result,) = listed() if is_persistent else all_reduce(strategy, "sum", [value])
        assert (result == total(comm, step) * comm.size).all()
        started = called.start() if is_persistent else inside(strategy, "start_all_reduce", "sum", value, out=value)
        assert (started.wait() == total(comm, step) * comm.size).all()


# A text of the error, and the arguments, of which one rank passes others.
MISTAKES = [
    ("array 0", InvalidArgumentError, lambda value, is_odd: (np.ones(6) if is_odd else value, {})),
    ("form of the nest", InvalidArgumentError, lambda value, is_odd: ([value] if is_odd else value, {})),
    ("op: rank", InvalidArgumentError, lambda value, is_odd: (value, {"reduce_op": "max" if is_odd else "sum"})),
    ("not a valid ReduceOp", ValueError, lambda value, is_odd: (value, {"reduce_op": "plus" if is_odd else "sum"})),
    (r"\[1\] is None", Exception, lambda value, is_odd: ([value, None if is_odd else value], {})),
    ("read-only", Exception, lambda value, is_odd: (value, {"out": np.broadcast_to(1.0, 5) if is_odd else value})),
    ("out", Exception, lambda value, is_odd: (value, {"out": np.ones(6) if is_odd else value})),
    ("same form", Exception, lambda value, is_odd: (value, {"out": [value] if is_odd else value})),
    ("share memory", Exception, lambda value, is_odd: ([value] * 2, {"out": [value] * 2 if is_odd else None})),
    ("options", InvalidArgumentError, lambda value, is_odd: (value, {"options": 3 if is_odd else None})),
    ("IndexedSlices", Exception, lambda value, is_odd: (mpidist.IndexedSlices(np.ones((1, 3)), [0], (2, 3)), {})),
]


@pytest.mark.ranks(2, 3)
def test_all_reduce_init_of_unlike_arguments_is_refused_on_all_ranks(strategy, comm):
    value = np.ones(5)
    for text, kind, mistake in MISTAKES:
        nest, arguments = mistake(value, comm.rank == comm.size - 1)
        for _ in range(2):
            with raises_everywhere(comm, kind, text):
                strategy.all_reduce_init(nest, **arguments)
        assert (value == 1).all()
        assert (strategy.all_reduce_init(value)() == comm.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("length", [5, 1 << 16])
def test_persistent_all_reduce_while_others_make_another_call_is_refused(strategy, comm, length):
    """Nothing is lost: the next calls are right. Also where a rank calls what another has started."""
    one, other = np.ones(length), np.ones(length + 1)
    calls = [strategy.all_reduce_init(one), strategy.all_reduce_init(other)]
    for step in range(1, 5):
        one[...], other[...] = step, step
        for call in calls:
            assert (call() == step * comm.size).all()
        with raises_everywhere(comm, InvalidArgumentError, "did not pass the same arguments"):
            calls[comm.rank == step % comm.size]()
        with raises_everywhere(comm, InvalidArgumentError, "start_all_reduce"):
            calls[0]() if comm.rank else calls[0].start().wait()
        started = [call.start() for call in calls]
        assert all((call.wait() == step * comm.size).all() for call in reversed(started))


@pytest.mark.ranks(1, 2)
def test_persistent_all_reduce_out_of_place_raises(strategy, comm):
    """In `run` and in another strategy, before `start`, in a second thread, and after the end."""
    value = np.ones(5)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.all_reduce_init(value))
    call = strategy.all_reduce_init(value)
    with pytest.raises(RuntimeError, match=r"call start\(\) before"):
        call.wait()
    call.start()
    with pytest.raises(RuntimeError, match=r"call wait\(\) before"):
        call.start()
    assert (call.wait() == comm.size).all()
    assert not call.is_done()
    with pytest.raises(RuntimeError, match=r"call start\(\) before"):
        call.wait()
    with Strategy(comm=comm) as other:
        for make in (call, call.start):
            with pytest.raises(RuntimeError, match="mixing different strategies"):
                other.run(make)
        with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            call()
    with strategy.scope():
        assert (call() == comm.size).all()
    assert (strategy.run(lambda: inside_merge(call)) == comm.size).all()
    errors = []

    def work():
        for _ in range(2):
            call()
        started.set()
        done.wait()

    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()  # takes the calls over
    started.wait()
    try:
        call()
    except RuntimeError as error:
        errors.append(str(error))
    done.set()
    thread.join()
    assert (len(errors) == 1 and "thread" in errors[0]) or comm.size == 1
    strategy.close()
    for make in (call, call.start):
        with pytest.raises(RuntimeError, match="closed"):
            make()


def inside_merge(call):
    context = mpidist.get_replica_context()
    assert context is not None
    return context.merge_call(lambda _: call())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("each", [1, 2])
def test_persistent_all_reduce_of_chosen_replicas_is_called_outside_of_run(comm, each):
    with Strategy(comm=comm, replicas=each * comm.size) as strategy:
        arrays = tuple(np.ones(9) for _ in range(each))
        call = strategy.all_reduce_init(mpidist.PerReplica(arrays), "sum")
        for step in range(1, 4):
            for array in arrays:
                array[...] = step
            assert (np.asarray(call()) == step * each * comm.size).all()
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(call)


@pytest.mark.ranks(1, 3)
def test_persistent_all_reduce_after_a_change_of_the_program_is_as_before(strategy, comm):
    """After a reset, and with shared memory; and when the nest or the arrays' shapes have changed."""
    value, late = np.ones((2, 3)), np.ones(70_000)
    nest = [value, late]
    calls = [strategy.all_reduce_init(value), strategy.all_reduce_init(nest), strategy.all_reduce_init(late, out=late)]

    def check():
        for _ in range(3):
            late[...] = 1
            assert (calls[0]() == comm.size).all()
            assert calls[0]().shape == (2, 3)
            assert [int(one.sum()) for one in calls[1]()] == [6 * comm.size, 70_000 * comm.size]
            assert calls[2]() is late
            assert (late == comm.size).all()

    check()
    strategy.reset()
    check()
    calls[0].start()
    strategy.reset()
    with suppress(RuntimeError):  # of the reset, unless the call was done before
        calls[0].wait()
    check()
    shared = strategy.symmetric_empty(70_000, float)
    check()
    del shared
    nest.clear()
    value.shape = (6,)
    value.flags.writeable = False
    check()


@pytest.mark.ranks(2)
def test_persistent_all_reduce_in_a_trace_is_traced(strategy, comm, tmp_path):
    call = strategy.all_reduce_init(np.ones(5))
    call()
    with strategy.trace(comm.bcast(tmp_path)):
        for _ in range(3):
            assert (call() == comm.size).all()
    comm.Barrier()
    assert any(b"all_reduce" in path.read_bytes() for path in comm.bcast(tmp_path).rglob("*") if path.is_file())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_started", [False, True])
def test_persistent_all_reduce_late_rank_raises_deadline(strategy, comm, is_started):
    """Also after calls of the same form with another deadline; a reset makes the call usable again."""
    value = np.ones(5)
    long, short = (strategy.all_reduce_init(value, options=Options(timeout_seconds=its)) for its in (600.0, 0.5))
    make = (lambda call: call.start().wait()) if is_started else (lambda call: call())
    for _ in range(3):
        assert (make(long) == comm.size).all()
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match=r"waited 0\.5 s"):
            make(short)
        comm.send(None, 1)
    else:
        comm.recv(source=0)
        with pytest.raises(DeadlineExceededError):
            make(long)
    with pytest.raises(DeadlineExceededError, match="an earlier call"):
        make(long)
    strategy.reset()
    assert (make(long) == comm.size).all()


@on_one_node
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["array", "list"])
def test_persistent_all_reduce_broken_off_on_one_rank_ends_on_all(strategy, comm, monkeypatch, kind):
    value = [np.ones(100_000), np.ones(9)] if kind == "list" else np.ones(100_000)
    call = strategy.all_reduce_init(value)
    for _ in range(3):
        call()
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(RecycledResults, "lend", no_memory)
        with raises_everywhere(comm, InvalidArgumentError, "MemoryError: Unable to allocate 9"):
            call()
    for _ in range(3):
        call()
    if comm.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(type(parts_of(strategy).group.agreement), "join_at_once", interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()
    else:
        with pytest.raises(PeerFailedError, match="KeyboardInterrupt"):
            call()
    strategy.reset()
    for _ in range(3):
        result = call()
        assert (result[0] == comm.size).all()


def no_memory(*_):
    raise MemoryError("Unable to allocate 9 TiB")


def interrupt(*_):
    raise KeyboardInterrupt


@on_one_node
@pytest.mark.ranks(2)
def test_persistent_all_reduce_passes_through_few_functions(strategy, comm):
    small, arrays = np.ones(5), [np.ones(64) for _ in range(10)]
    calls = strategy.all_reduce_init(small, out=small), strategy.all_reduce_init(arrays, out=arrays)
    assert are_repeated(strategy)
    for call, most in zip(calls, (15, 34) if native is not None else (50, 120), strict=True):
        assert strategy.run(least_called, args=(comm, call, most)) <= most


@pytest.mark.ranks(1, 2)
def test_persistent_all_reduce_that_is_gone_keeps_no_array(strategy, comm):
    for out_is_value in (False, True):
        arrays = [np.ones(5), np.ones(70_000)]
        values = [*arrays, arrays]
        calls = [strategy.all_reduce_init(value, out=value if out_is_value else None) for value in values]
        for _ in range(3):
            for call in calls:
                call()
        calls[0].start().wait()
        seen = [weakref.ref(array) for array in arrays]
        del arrays, values, call, calls
        assert are_gone(seen)
