"""Rules of servers against the same rules on one process, and functions that a program registers."""

from itertools import product

import ml_dtypes  # noqa: F401  it gives NumPy bfloat16 by name
import numpy as np
import pytest
from parameter_server.clusters import on_workers, worker_test

from mpidist import IndexedSlices, Variable
from mpidist.errors import PeerFailedError
from mpidist.experimental import ParameterServerStrategy as Strategy
from mpidist.experimental import server_rules

LARGE = 600_001


@server_rules.register("clipped step")
def clipped_step(value, gradient, memory, limit, rate):
    memory["count"] += 0
    value -= rate * np.clip(gradient, -limit, limit)


@server_rules.register("fails")
def fails(value, gradient, memory):
    value += 100
    raise ZeroDivisionError("by intent, of a file \udcff")  # as names of files may be


@server_rules.register("keeps its gradients")
def keeps(value, gradient, memory):
    memory["kept"] = [*memory.get("kept", []), gradient]
    value[...] = sum(memory["kept"])


@server_rules.register("fails of three")
def fails_of_three(value, gradient, memory):
    if len(value) == 3:
        raise ValueError("by intent")
    value += gradient


class Sequential:
    """The rules, written out once more, for all gradients in their order."""

    @staticmethod
    def sgd(value, gradients):
        for gradient in gradients:
            value = value - 0.1 * gradient
        return value

    @staticmethod
    def momentum(value, gradients):
        velocity = 0.0 * value
        for gradient in gradients:
            velocity = 0.9 * velocity + gradient
            value = value - 0.1 * velocity
        return value

    @staticmethod
    def nesterov(value, gradients):
        velocity = 0.0 * value
        for gradient in gradients:
            velocity = 0.9 * velocity + gradient
            value = value - 0.1 * (gradient + 0.9 * velocity)
        return value

    @staticmethod
    def adam(value, gradients):
        mean, variance = 0.0 * value, 0.0 * value
        for count, gradient in enumerate(gradients, 1):
            mean = 0.9 * mean + 0.1 * gradient
            variance = 0.999 * variance + 0.001 * gradient**2
            rate = 0.1 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            value = value - rate * mean / (np.sqrt(variance) + 1e-7)
        return value


RULES = {
    "sgd": server_rules.SGD(0.1),
    "momentum": server_rules.Momentum(0.1),
    "nesterov": server_rules.Momentum(0.1, 0.9, nesterov=True),
    "adam": server_rules.Adam(0.1),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.core
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [3, LARGE])
@worker_test()
def test_rules_follow_their_formulas(strategy, name, size):
    """All workers push the same gradients, so that their order does not matter."""
    rng = np.random.default_rng(1)
    start, gradient = rng.random(size) + 1, rng.random(size) + 0.5
    with strategy.scope():
        variable, other = Variable(start), Variable(2 * start)
    for _ in range(3):
        strategy.push([variable, other], [gradient, 2 * gradient], RULES[name])
    strategy.barrier()
    expected = getattr(Sequential, name)(start, [gradient] * 3 * strategy.topology.size)
    np.testing.assert_allclose(variable.numpy(), expected, 1e-9)
    expected = getattr(Sequential, name)(2 * start, [2 * gradient] * 3 * strategy.topology.size)
    np.testing.assert_allclose(other.numpy(), expected, 1e-9)


@pytest.mark.ranks(2, 3)
@worker_test()
def test_rules_take_rows(strategy):
    """A row that is named twice gets the sum; other rows stay as they are."""
    rows, times = IndexedSlices(np.array([[1.0, 2], [3, 4], [5, 6]]), [2, 0, 2]), strategy.topology.size
    for name, rule in RULES.items():
        with strategy.scope():
            table = Variable(np.ones((4, 2)))
        strategy.push(table, rows, rule)
        strategy.barrier()
        value = table.numpy()
        for row, gradient in ((0, np.array([3.0, 4])), (2, np.array([6.0, 8]))):
            np.testing.assert_allclose(value[row], getattr(Sequential, name)(np.ones(2), [gradient] * times), 1e-9)
        assert (value[[1, 3]] == 1).all()


TINY = np.full((2, 3), 1e-4)  # its square is 0 in float16, and what Adam divides by was 1e-7
STEPS = [(name, TINY.astype(dtype)) for name in ("momentum", "adam") for dtype in ("float16", "bfloat16")]


@pytest.mark.ranks(3)
@worker_test()
def test_state_of_variables_is_as_precise_as_their_formulas_need(strategy):
    """Half precision has more in its state, and Adam steps along a complex gradient."""
    for (name, gradient), is_in_rows in product(STEPS, (False, True)):
        with strategy.scope():
            variable = Variable(np.ones((2, 3), gradient.dtype))
        if strategy.is_chief:
            for _ in range(3):
                strategy.push(variable, IndexedSlices(gradient, [0, 1]) if is_in_rows else gradient, RULES[name])
        strategy.barrier()
        expected = getattr(Sequential, name)(np.ones((2, 3)), [gradient.astype(float)] * 3)
        np.testing.assert_allclose(variable.numpy().astype(float), expected, 0.01)
    with strategy.scope():
        variable = Variable(np.ones(2, np.complex128))
    if strategy.is_chief:
        strategy.push(variable, np.array([3j, 4 - 3j]), server_rules.Adam(0.1))
    strategy.barrier()
    np.testing.assert_allclose(variable.numpy(), [1 - 0.1j, 1 - 0.1 * (0.8 - 0.6j)], 1e-6)


@pytest.mark.ranks(3)
@worker_test()
def test_steps_that_are_fractions_need_a_variable_that_holds_them(strategy):
    """Before anything is sent: on a server the rate became a whole number, 0, and the variable did not change."""
    for name, dtype in (("sgd", "int64"), ("momentum", "uint8"), ("adam", "bool")):
        with strategy.scope():
            count, weights = Variable(np.ones((2, 3), dtype), name="count"), Variable(np.ones(2))
        text = f"needs a variable of floating-point numbers, and 'count' is of .*{dtype}"
        for gradient in (np.ones((2, 3), dtype), IndexedSlices(np.ones((1, 3), dtype), [1])):
            with pytest.raises(TypeError, match=text):
                strategy.push([weights, count], [np.ones(2), gradient], RULES[name])
        strategy.barrier()
        assert weights.numpy().tolist() == [1, 1]


@pytest.mark.ranks(3)
@worker_test()
def test_rule_keeps_its_state_when_the_learning_rate_changes(strategy):
    """What the server keeps belongs to the rule, whatever its numbers."""
    if not strategy.is_chief:
        with strategy.scope():
            Variable(0.0)
        return
    with strategy.scope():
        variable = Variable(0.0)
    velocity = value = 0.0
    for rate in (0.5, 0.25, 0.125):
        strategy.push(variable, 1.0, server_rules.Momentum(rate, 0.5))
        velocity = 0.5 * velocity + 1
        value -= rate * velocity
    assert float(variable) == value


@pytest.mark.ranks(1, 3)
@worker_test()
def test_rule_registered_by_the_program_is_applied(strategy):
    with strategy.scope():
        variable = Variable(np.zeros(LARGE))
    strategy.push(variable, np.arange(LARGE, dtype=float), server_rules.Registered("clipped step", 2.0, 0.5))
    strategy.push(variable, IndexedSlices([1.0], [0]), server_rules.Registered("clipped step", 2.0, 0.5))
    strategy.barrier()
    assert variable.numpy()[:3].tolist() == [part * strategy.topology.size for part in (-0.5, -0.5, -1.0)]


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("size", [3, LARGE])
@worker_test()
def test_rule_that_raises_is_reported_and_changes_nothing(strategy, size):
    """The worker that pushed is told at its next request; the server goes on."""
    with strategy.scope():
        variable = Variable(np.zeros(size))
    strategy.push(variable, np.ones(size), server_rules.Registered("fails"))
    with pytest.raises(
        RuntimeError,
        match=r"change of .* on parameter server 0 .*ZeroDivisionError: .*\\udcff \(at .*:\d+ in fails\)",
    ):
        strategy.flush()
    strategy.barrier()
    assert (variable.numpy() == 0).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("size", [3, LARGE])
def test_rule_that_overflows_gives_infinity_whatever_numpy_is_set_to_raise(comm, size):
    def work(strategy):
        with strategy.scope():
            value = Variable(np.zeros(size, np.float32))
        gradient = np.zeros(size, np.float32)
        gradient[-1] = -3e38
        changes = [gradient, IndexedSlices(gradient[-2:], [size - 2, size - 1])]
        for change, how in product(changes, ["assign_sub", server_rules.SGD(1.0), server_rules.Momentum(1.0, 0.0)]):
            value.assign(np.full(size, 3e38, np.float32))
            if how != "assign_sub" or change is gradient:
                strategy.push(value, change, how)
            else:
                value.scatter_sub(change)
            assert value.numpy()[-2:].tolist() == [np.float32(3e38), np.inf]

    with np.errstate(all="raise"):
        on_workers(comm, work)


@pytest.mark.no_mpi
def test_rule_without_registration_is_refused():
    with pytest.raises(ValueError, match="no rule 'magic' is registered"):
        server_rules.Registered("magic")
    with pytest.raises(ValueError, match="choose another name"):
        server_rules.register("Adam")(fails)
    with pytest.raises(ValueError, match="choose another name"):
        server_rules.register("fails")(clipped_step)
    assert server_rules.register("fails")(fails) is fails  # of a module that is imported twice
    with pytest.raises(TypeError, match=r"Momentum takes numbers, such as 0\.1, got 0\.1, 'a', False"):
        server_rules.Momentum(0.1, "a")
    with pytest.raises(ValueError, match="up to 6 numbers"):
        server_rules.Registered("fails", 1, 2, 3, 4, 5, 6, 7)
    assert repr(server_rules.SGD(0.5)) == "SGD(0.5)"
    assert repr(server_rules.Registered("fails", 1)) == "Registered('fails', 1.0)"
    with pytest.raises(TypeError, match=r"register takes a name: .*\("):
        server_rules.register(fails)
    with pytest.raises(TypeError, match=r"rule 'Step' must be a function of \(value, .*the class Sequential"):
        server_rules.register("Step")(Sequential)
    server_rules.register("pure")(lambda value, gradient, memory: value - gradient)
    with pytest.raises(TypeError, match=r"rule 'pure' returned .*numpy\.ndarray; it must change `value` in place"):
        server_rules.Registered("pure").apply(np.zeros(3), np.ones(3), {}, ())


@pytest.mark.ranks(3)
@worker_test()
def test_rule_of_one_rank_alone_is_refused_by_the_server(strategy):
    server_rules.register("of workers")(lambda value, gradient, memory: None)
    with strategy.scope():
        variable = Variable(0.0)
    with pytest.raises(RuntimeError, match="no rule 'of workers' is registered"):
        strategy.push(variable, 1.0, server_rules.Registered("of workers"))
    assert float(variable) == 0.0


@pytest.mark.ranks(2)
@pytest.mark.core
def test_close_raises_for_a_failed_change(comm):
    """At the latest; and the server does not wait for that worker."""
    strategy = Strategy(comm=comm)
    if strategy.is_ps:
        with pytest.raises(PeerFailedError, match="rank 0 left because of an exception: RuntimeError"):
            strategy.serve()
        strategy.close()
    else:
        with strategy.scope():
            variable = Variable(0.0)
        strategy.push(variable, 1.0, server_rules.Registered("fails"))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            strategy.close()
    comm.Barrier()


@pytest.mark.ranks(1, 2)
@worker_test()
def test_rule_may_keep_its_gradients(strategy):
    """Which came in memory that the next request uses again."""
    with strategy.scope():
        variables = [Variable(np.zeros(count)) for count in (4, 20_000, 400_000)]
    for step in range(3):
        for variable in variables:
            strategy.push(variable, np.full(variable.shape, 2.0**step), server_rules.Registered("keeps its gradients"))
    assert all((value == 7).all() for value in strategy.read(variables))


@pytest.mark.ranks(1, 2)
@worker_test()
def test_changes_behind_one_that_fails_are_made(strategy):
    with strategy.scope():
        variables = [Variable(np.zeros(count)) for count in (3, 4)]
    for given in ([np.ones(3), np.ones(4)], [IndexedSlices(np.ones(4), [0, 1, 2, 0]), IndexedSlices([1.0], [3])]):
        variables[1].assign(np.zeros(4))
        with pytest.raises((RuntimeError, ValueError), match="by intent"):
            push_and_wait(strategy, variables, given)
        assert variables[1].numpy()[3] == 1


def push_and_wait(strategy, variables, given):
    strategy.push(variables, given, server_rules.Registered("fails of three"))
    strategy.flush()
