"""Calls of all ranks inside functions that JAX transforms: `mpidist.jax`."""

import os
import subprocess
import sys
import threading

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jobs.faults import run_command
from mpi_session.launch import Launcher
from support.everywhere import raises_everywhere, same_everywhere

import mpidist.jax
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError

several = pytest.mark.ranks(min=2)


def calls_of(strategy):
    """How many calls the ranks have made together."""
    return int(parts_of(strategy).group.agreement.sequence)


def ranks_sum(comm):
    """The sum of 1, 2, ... over the ranks."""
    return comm.size * (comm.size + 1) // 2


TREE = {
    "layers": [(jnp.ones((2, 3)), jnp.ones(3, jnp.bfloat16)), None],
    "empty": jnp.ones((0, 3)),
    "float0": np.zeros(2, jax.dtypes.float0),
    "numbers": (np.arange(3, dtype=np.int32), 1.0, 2, True, np.float64(3)),
}


@several
def test_psum_of_tree_in_jit_is_one_call(comm, placement):
    with Strategy(comm=comm) as strategy:
        before = calls_of(strategy)
        total = strategy.run(jax.jit(lambda: mpidist.jax.psum(TREE)))
        assert calls_of(strategy) == before + 1
    assert jax.tree.structure(total) == jax.tree.structure(TREE)
    assert total["float0"].dtype == jax.dtypes.float0
    (matrix, half), none = total["layers"]
    assert (matrix == comm.size).all()
    assert (half == comm.size).all()
    assert (half.dtype, none, total["empty"].shape) == (jnp.bfloat16, None, (0, 3))
    dtypes = ["int32", "float32", "int32", "int32", "float32"]
    assert [one.dtype.name for one in total["numbers"]] == dtypes
    assert [one.tolist() for one in total["numbers"]] == [[0, comm.size, 2 * comm.size]] + [
        comm.size * one for one in (1, 2, 1, 3)
    ]


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_jax_reductions_are_right_in_jit_and_outside(comm, name):
    everyone = np.arange(1.0, comm.size + 1)
    want = {"psum": everyone.sum(), "pmean": everyone.mean(), "pmax": everyone.max(), "pmin": everyone.min()}[name]
    call = getattr(mpidist.jax, name)
    with Strategy(comm=comm) as strategy, strategy.scope():
        for function in (call, jax.jit(call)):
            result = function({"x": jnp.full(2, comm.rank + 1.0), "n": comm.rank + 1})
            assert result["x"].tolist() == [pytest.approx(want)] * 2
            assert float(result["n"]) == pytest.approx(want)


def test_pmean_in_scan_divides_once_a_step(comm):
    def step(weight, _):
        return mpidist.jax.pmean(weight) + 1, mpidist.jax.psum(1)

    with Strategy(comm=comm) as strategy:
        train = jax.jit(lambda weight: jax.lax.scan(step, weight, None, length=3))
        weight, sizes = strategy.run(train, args=(jnp.float32(comm.rank),))
    assert float(weight) == pytest.approx((comm.size - 1) / 2 + 3)
    assert sizes.tolist() == [comm.size] * 3


@pytest.mark.parametrize("name", ["psum", "pmean"])
@pytest.mark.parametrize("order", [1, 2])
def test_gradient_is_the_same_reduction_of_gradients(comm, name, order):
    call = getattr(mpidist.jax, name)

    def loss(x, n):  # each rank weighs it by its number, from 1 on
        result = call({"x": x, "n": n})
        return (comm.rank + 1) * (result["x"] ** 2).sum() + result["n"].sum()

    gradient = jax.grad(loss)
    if order == 2:
        gradient = jax.grad(lambda x, n: jax.grad(loss)(x, n).sum())
    with Strategy(comm=comm) as strategy:
        result = strategy.run(jax.jit(gradient), args=(jnp.ones(3), jnp.arange(2)))
    size, total = (comm.size, ranks_sum(comm)) if name == "psum" else (1, ranks_sum(comm) / comm.size)
    want = 2 * size * total
    assert result.tolist() == [pytest.approx(want)] * 3


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_gradient_of_pmax_is_refused(comm, name):
    call = getattr(mpidist.jax, name)
    with Strategy(comm=comm) as strategy, strategy.scope():
        with pytest.raises(NotImplementedError, match=f"{name} has no gradient: pass it jax.lax.stop_gradient"):
            jax.jit(jax.grad(call))(1.0)
        scaled = jax.grad(lambda x: x / call(jax.lax.stop_gradient(x)))
        assert float(jax.jit(scaled)(2.0)) == 0.5


@several
def test_vmap_makes_one_call(comm):
    def loss(x):
        return (mpidist.jax.psum({"x": x, "same": jnp.ones(2)})["x"] * jnp.arange(3.0)).sum()

    rows = jnp.ones((3, 4)) * (comm.rank + 1)
    with Strategy(comm=comm) as strategy, strategy.scope():
        before = calls_of(strategy)
        losses = jax.jit(jax.vmap(loss, in_axes=1))(rows)
        assert calls_of(strategy) == before + 1
        gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=1, out_axes=1))(rows)
    assert losses.tolist() == [3 * ranks_sum(comm)] * 4
    assert gradients.T.tolist() == [[0, comm.size, 2 * comm.size]] * 4


def test_across_ranks_trains_as_one_process_with_the_whole_batch(comm):
    x = jnp.linspace(-1, 1, 12 * 3).reshape(12, 3)
    weights = {"w": jnp.ones(3), "b": jnp.zeros(())}

    def train(optimizer, x):
        def step(carried, _):
            weights, state = carried
            gradient = jax.grad(lambda own: ((x @ own["w"] + own["b"] - jnp.sin(x[:, 0])) ** 2).mean())(weights)
            updates, state = optimizer.update(gradient, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, optimizer.init(weights)), None, length=5)[0][0]

    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    with Strategy(comm=comm) as strategy:
        optimizer = optax.chain(mpidist.jax.across_ranks(), optax.apply_if_finite(plain, 5))
        trained = strategy.run(jax.jit(lambda x: train(optimizer, x)), args=(x[comm.rank :: comm.size],))
    for name, want in jax.jit(lambda x: train(plain, x))(x).items():
        assert same_everywhere(comm, np.asarray(trained[name]))
        np.testing.assert_allclose(trained[name], want, rtol=1e-4, atol=1e-5)


def test_psum_of_every_device_of_a_rank_is_refused(comm):
    spec, devices = jax.sharding.PartitionSpec("d"), jax.devices()
    with Strategy(comm=comm) as strategy:
        for mesh in (jax.sharding.Mesh(devices[:1], "d"), jax.sharding.Mesh(devices[:2], "d")):
            sharded = jax.shard_map(mpidist.jax.psum, mesh=mesh, in_specs=spec, out_specs=spec)
            for function in (jax.jit(sharded), jax.pmap(mpidist.jax.psum)):
                if mesh.size == 1:
                    assert strategy.run(function, args=(jnp.ones(1),)).tolist() == [comm.size]
                    continue
                with raises_everywhere(comm, RuntimeError, "psum: inside jax.shard_map or jax.pmap, each of 2 devices"):
                    strategy.run(function, args=(jnp.ones(2),))


@several
def test_mismatch_in_jit_raises_on_every_rank(comm, strategy):
    for own, text in (
        (lambda: mpidist.jax.psum({"w": jnp.ones(2 + comm.rank)}), r"array \['w'\]: rank 0: f32\[2\]; rank 1: f32"),
        (lambda: mpidist.jax.psum(1) if comm.rank else mpidist.jax.pmax(1), "rank 0: mpidist.jax.pmax; rank"),
    ):
        with raises_everywhere(comm, InvalidArgumentError, text):
            strategy.run(jax.jit(own))
        with raises_everywhere(comm, InvalidArgumentError, text), strategy.scope():
            jax.jit(own)()
    assert int(strategy.run(jax.jit(lambda: mpidist.jax.psum(1)))) == comm.size


@several
def test_error_in_jit_is_that_of_jax_inside_of_run(comm, strategy, caplog):
    problems = []

    def step():
        for as_own in (False, True):
            try:
                jax.jit(lambda: mpidist.jax.psum(jnp.ones(2 + comm.rank)))()
            except jax.errors.JaxRuntimeError as error:
                problems.append(error)
                if as_own:
                    raise KeyError(str(error)) from None

    with raises_everywhere(comm, KeyError, "InvalidArgumentError: mpidist.jax.psum"):
        strategy.run(step)
    assert len(problems) == 2
    assert caplog.records == []  # JAX logs each error of a callback


@several
def test_deadline_in_jit_is_caught_and_reset(comm):
    late, step = comm.size - 1, jax.jit(mpidist.jax.psum)
    with Strategy(comm=comm, communication_options=mpidist.CommunicationOptions(timeout_seconds=1)) as strategy:
        _ = [comm.recv(source=other) for other in range(late * (comm.rank == late))]  # they have given up
        with pytest.raises(DeadlineExceededError):
            strategy.run(step, args=(1,))
        if comm.rank != late:
            comm.send(None, late)
        strategy.reset()
        assert strategy.reduce("SUM", 1, options=mpidist.CommunicationOptions(timeout_seconds=0)) == comm.size


def test_calls_in_threads_of_jax_are_in_the_order_of_the_program(comm, strategy):
    """XLA goes on in a thread of its own after a product of large matrices."""

    def step(weight, _):
        weight = mpidist.jax.pmean(jnp.sin(weight @ weight) * 0.01 + 1)
        return weight, mpidist.jax.psum(weight[0, 0])

    train = jax.jit(lambda x: jax.lax.scan(step, x, None, length=10))
    for _ in range(3):
        weight, sums = strategy.run(train, args=(jnp.full((512, 512), comm.rank + 1.0),))
        strategy.check_equal((weight, sums), what="the weights")
        assert float(strategy.reduce("max", sums[-1])) == pytest.approx(comm.size * float(weight[0, 0]))


def test_compiled_function_never_uses_the_strategy_of_another_thread(comm):
    """Here too XLA makes the calls in a thread of its own."""
    gradient = jax.grad(lambda x: (jnp.tanh(x @ x) ** 2).mean())
    step = jax.jit(lambda x: mpidist.jax.psum(gradient(x) * 0 + 1)[0, 0])
    value, inside, leave = jnp.ones((512, 512)), threading.Event(), threading.Event()

    def stay():  # also in a compiled function that has its own calls of Python
        with mpidist.OneDeviceStrategy().scope():
            jax.jit(lambda: jax.debug.callback(lambda: (inside.set(), leave.wait(60)), ordered=True))()

    thread = threading.Thread(target=stay, daemon=True)
    with Strategy(comm=comm) as strategy:
        assert strategy.run(step, args=(value,)) == comm.size
        thread.start()
        inside.wait()
        assert strategy.run(step, args=(value,)) == comm.size
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"mpidist.jax.psum: no strategy is current"):
            step(value)
        leave.set()
        thread.join()


def test_compiled_function_uses_the_strategy_of_the_call(comm):
    count = jax.jit(lambda: mpidist.jax.psum(1))
    half = comm.Split(comm.rank % 2)
    with Strategy(comm=comm) as everyone, Strategy(comm=half) as some:
        assert [int(one.run(count)) for one in (everyone, some, everyone)] == [comm.size, half.size, comm.size]
        with some.scope():
            assert int(count()) == half.size
    half.Free()


def test_call_without_ranks_to_combine_is_refused(comm):
    with pytest.raises(RuntimeError, match=r"^mpidist.jax.psum: no strategy is current.* call the function by "):
        jax.jit(mpidist.jax.psum)(1.0)
    why = "has no ranks in lock step with one replica each"
    with (
        Strategy(replicas=2 * comm.size, comm=comm) as strategy,
        strategy.scope(),
        pytest.raises(RuntimeError, match=why),
    ):
        jax.jit(mpidist.jax.psum)(1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "mpidist.jax.psum: layer/w: .*text"),
        (jnp.ones(2, jnp.int4), "mpidist.jax.psum: layer/w: SUM needs numbers, got dtype int4"),
        (None, r"mpidist.jax.psum: layer/w: key<fry> .* pass jax.random.key_data\(key\)"),
    ],
)
def test_leaf_without_numbers_is_named(comm, value, text):
    value = jax.random.key(0) if value is None else value
    problems = (TypeError, InvalidArgumentError)
    with Strategy(comm=comm) as strategy, strategy.scope(), pytest.raises(problems, match=text):
        mpidist.jax.psum({"layer": {"w": value}})


@pytest.mark.no_mpi
def test_import_after_jax_has_computed_is_refused():
    program = 'import jax; CONFIG; jax.numpy.ones(1); import mpidist.jax; print("imported")'
    ends = []
    for config in ("0", 'jax.config.update("jax_cpu_enable_async_dispatch", False)'):
        command = [sys.executable, "-c", program.replace("CONFIG", config)]
        ends.append(subprocess.run(command, capture_output=True, text=True, check=False))
    assert "RuntimeError: import mpidist.jax before JAX computes anything" in ends[0].stderr
    assert [(one.returncode, one.stdout) for one in ends] == [(1, ""), (0, "imported\n")]


FAILS = """
import jax, mpidist, mpidist.jax
with mpidist.MultiWorkerMirroredStrategy() as strategy:
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (mpidist.jax.psum(c), None), x, None, length=3)[0])
    strategy.run(step, args=(jax.numpy.ones(2),))
    print("first", flush=True)
    fails = jax.jit(lambda: jax.debug.callback(lambda: strategy.rank == 1 and 1 / 0, ordered=True))
    FAULT
    print("second", flush=True)
"""


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("strategy.run(step, args=(jax.numpy.ones(2 + strategy.rank),))", "InvalidArgumentError: mpidist.jax.psum"),
        ("strategy.rank == 1 and 1 / 0; strategy.run(step, args=(jax.numpy.ones(2),))", "ZeroDivisionError: division"),
        ("fails(); strategy.run(step, args=(1,))", "ZeroDivisionError: division"),
    ],
    ids=["other shape", "a rank raises", "a callback of a rank raises"],
)
def test_job_ends_with_the_error(tmp_path, fault, text):
    file = tmp_path / "program.py"
    file.write_text(FAILS.replace("FAULT", fault))
    ended = run_command(tmp_path, [*Launcher.find(None).command, "-n", "2", sys.executable, str(file)], 2)
    assert ended.status != 0
    assert "first" in ended.out
    assert text in ended.err
    if "Zero" in text:  # rank 0 names it too, or has been ended before its next call
        of_others = [line for line in ended.err.splitlines() if line.startswith("[rank 0")]
        assert all("rank 1 left because of an exception: ZeroDivisionError: division" in line for line in of_others)
    assert ("1 / 0" in ended.err) == ("Zero" in text)  # the line of the rank at fault
    assert ended.err.count("Traceback") == 1 + 2 * ("fails" in fault)  # JAX prints what is not mpidist's
