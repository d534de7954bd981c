"""`Strategy.check_equal`, and `MPIDIST_CHECK_VALUES`: values that should be equal on all ranks."""

import gc
import weakref
import zlib
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import tensors
from support.everywhere import raises_everywhere

import mpidist
from mpidist import Mirrored, MultiWorkerMirroredStrategy, PerReplica, Variable
from mpidist.checksums import checksum
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]


def state(own=None):
    """A nest like the states of a module and its optimizer; `own` takes the place of one array."""
    moments = {0: {"step": np.float32(3), "m": np.array([np.nan, -0.0])}, 1: {"step": 4, "m": np.zeros((0, 2))}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "name": "a", "on": True, "z": 1j, "raw": b"x"}]
    model = OrderedDict(weight=np.arange(6.0).reshape(2, 3).T if own is None else own, bias=tensors.Tensor(np.ones(2)))
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "half": np.ones(3, ">f2")}


@pytest.mark.no_mpi
def test_checksum_copies_its_bytes():
    """Any bytes of an array of any length, to any address."""
    draw = np.random.default_rng(0)
    for length in (0, 1, 63, 64, 65, 200, 65536, 65600, 200000):
        for begin, end, shift in [
            (0, length, 0),
            *((*sorted(draw.integers(0, length + 1, 2)), at) for at in range(17)),
        ]:
            message = draw.integers(0, 256, length + shift, np.uint8)[shift:]
            memory = np.full(end - begin + shift + 1, 7, np.uint8)
            assert checksum(message, memory[shift:-1], begin) == zlib.crc32(message.tobytes())
            assert (memory[shift:-1] == message[begin:end]).all()
            assert (memory[:shift] == 7).all()
            assert memory[-1] == 7
    numbers, memory = np.asfortranarray(draw.random((30, 70))), np.zeros(500)
    assert checksum(numbers, memory, 17) == zlib.crc32(numbers.tobytes())
    assert (memory == numbers.ravel()[17:517]).all()


def test_check_equal_equal_nests_pass(comm):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        strategy.check_equal(state())
        strategy.check_equal([])
        strategy.check_equal({"v": Variable(np.ones(3)), "m": Mirrored([np.ones(2)]), "b": ml_dtypes.bfloat16(1.5)})
        strategy.check_equal(np.arange(6)[::2] if comm.rank else np.array([0, 2, 4]), "an array")


@pytest.mark.ranks(3)
def test_check_equal_looks_at_no_padding(comm):
    """Of a long double of x86 6 of 16 bytes are padding."""
    value = np.ones(3, np.longdouble)
    if np.finfo(value.dtype).nmant == 63:
        value.view(np.uint8).reshape(3, -1)[:, 10:] = comm.rank
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        strategy.check_equal(value)
        value[1] += comm.rank
        with raises_everywhere(comm, InvalidArgumentError, "differ"):
            strategy.check_equal(value)


@pytest.mark.ranks(3)
def test_check_equal_leaves_that_differ_are_named(comm):
    last = comm.size - 1
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        weight = np.zeros((3, 2))
        weight[2, 1] = comm.rank == last
        pattern = (
            r"^check_equal \(call \d+\): the model: 1 of 15 leaves differ between ranks, compared bit by bit\n"
            rf"  \['model'\]\['weight'\]: ranks? [-0-9]+: checksum \w+; rank {last}: checksum \w+\n  was an all_reduce"
        )
        with raises_everywhere(comm, InvalidArgumentError, pattern):
            strategy.check_equal(state(weight), what="the model")
        for value in (np.nan if comm.rank else -np.nan, 0.0 if comm.rank else -0.0, str(comm.rank), comm.rank):
            with raises_everywhere(comm, InvalidArgumentError, r"values: 1 of 1 leaves differ .*\n  the value: rank 0"):
                strategy.check_equal(np.array(value) if isinstance(value, float) else value)
        with raises_everywhere(comm, InvalidArgumentError, r"values: 20 of 20 leaves .*\n  \.\.\. and 12 more\n"):
            strategy.check_equal([np.full(2, comm.rank)] * 20)
        strategy.check_equal(state())


@pytest.mark.ranks(3)
def test_check_equal_variable_that_one_rank_has_changed_is_named(comm):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.zeros(3))
        if comm.rank == 1:
            strategy.run(weights.assign, args=(np.ones(3),))
        with raises_everywhere(comm, InvalidArgumentError, r"\['w'\]: rank.* 0.*: checksum \w+; rank 1: checksum"):
            strategy.check_equal({"w": weights})


@pytest.mark.ranks(3)
def test_check_equal_other_forms_are_an_error_everywhere(comm):
    last = comm.rank == comm.size - 1
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        for values, pattern in (
            (np.zeros(3 if last else 2), r"form of the value: ranks? [-0-9]+: float64\[2\]; rank \d: float64\[3\]"),
            (np.zeros(3, "f" if last else "d"), r"float64\[3\]; rank \d: float32\[3\]"),
            (1 if last else 1.0, "float; rank .: int"),
            ({"a": 1} if last else {"b": 1}, r"form of \['a'\]: ranks? [-0-9]+: -; rank \d: int"),
        ):
            with raises_everywhere(comm, InvalidArgumentError, rf"^check_equal \(call \d+\): .*{pattern}"):
                strategy.check_equal(values)
        with raises_everywhere(comm, InvalidArgumentError, r"check_equal \(call \d+\): .*what: rank"):
            strategy.check_equal(1, "the model" if last else "a model")
        with raises_everywhere(comm, InvalidArgumentError, "an error on rank .* TypeError: .*object"):
            strategy.check_equal([1, object() if last else 2])


def test_check_equal_wrong_use_is_refused(comm):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        for value, pattern in (
            (object(), "check_equal: the value: cannot take a value of type builtins.object"),
            ([np.array([None])], r"check_equal: \[0\] is an array of objects of Python"),
        ):
            with raises_everywhere(comm, TypeError, pattern):
                strategy.check_equal(value)
        with pytest.raises(RuntimeError, match="check_equal requires being in cross-replica context"):
            strategy.run(lambda: strategy.check_equal(1))
    with (
        MultiWorkerMirroredStrategy(replicas=8, comm=comm) as strategy,
        raises_everywhere(comm, ValueError, "check_equal: the value differs between the replicas of one rank"),
    ):
        strategy.check_equal(PerReplica([*range(len(parts_of(strategy).replicas.ids_here))]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("replicas", [None, 8])
def test_check_values_finds_a_variable_that_differs_after_the_run(comm, monkeypatch, replicas):
    monkeypatch.setenv("MPIDIST_CHECK_VALUES", "3")
    with MultiWorkerMirroredStrategy(replicas=replicas, comm=comm) as strategy:
        with strategy.scope():
            weights, other = Variable(np.zeros(3), name="weights"), Variable(1, name="other")
            metric = Variable(0, synchronization="ON_READ")
        gone = weakref.ref(other)
        del other  # on all ranks: it is compared no longer
        gc.collect()
        assert gone() is None
        step = 0

        def train():
            metric.assign(comm.rank)
            weights.assign(np.full(3, comm.rank if step == 4 else step))

        for step in range(5):  # noqa: B007  the function reads it
            strategy.run(train)
        pattern = r"_VALUES=3\) \(call \d+\): 1 of 1 variables differ .* after run 6\n  variable 'weights': "
        with raises_everywhere(comm, InvalidArgumentError, pattern):
            strategy.run(lambda: None)
        weights.assign(np.zeros(3))
        for _ in range(3):
            strategy.run(lambda: None)


@pytest.mark.ranks(3)
def test_check_values_run_of_the_chief_alone_is_refused(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_CHECK_VALUES", "1")
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        pattern = "rank 0: comparison of variables .*; ranks? [-0-9]+: barrier.*all ranks call run equally often"
        with raises_everywhere(comm, InvalidArgumentError, pattern):
            if comm.rank == 0:
                strategy.run(lambda: None)
            strategy.barrier()


def test_check_values_not_set_makes_no_call(comm):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.zeros(3))
        before = parts_of(strategy).group.agreement.sequence
        for step in range(200):
            strategy.run(weights.assign, args=(np.full(3, comm.rank + step),))
        assert parts_of(strategy).group.agreement.sequence == before
        assert mpidist.get_strategy() is strategy
