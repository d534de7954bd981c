"""Arrays of JAX as native arrays, and back, and pytrees of them: dataclasses, states of flax and of optax."""

import os
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, struct
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import Variable, nest
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport.array_libraries.libraries import copied, library_of

LOW = [name for name in dir(ml_dtypes) if name.startswith(("bfloat16", "float8")) and hasattr(jnp, name)]
OTHERS = ["float32", "float16", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool", "complex64"]


def aligned(count, dtype):
    """Return ones at a multiple of 64 bytes, as large results of mpidist are."""
    dtype = np.dtype(dtype)
    memory = np.empty(count * dtype.itemsize + 64, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][: count * dtype.itemsize].view(dtype)
    array[...] = 1
    return array


def address(array):
    return int(array.__array_interface__["data"][0])


@pytest.mark.no_mpi
@pytest.mark.parametrize("name", OTHERS + LOW)
def test_jax_dtypes_are_viewed_both_ways(name):
    value = jnp.ones((4, 25)).astype(name)
    array = library_of(value).to_native(value)
    assert (array.dtype.name, array.shape, address(array)) == (name, (4, 25), value.unsafe_buffer_pointer())
    result = aligned(100, array.dtype)
    again = library_of(value).from_native(result, value)
    assert (again.dtype, again.unsafe_buffer_pointer()) == (value.dtype, address(result))
    assert not again.committed
    assert (copied(value) == value).all()


@pytest.mark.no_mpi
def test_jax_array_may_be_donated_after_a_read():
    """JAX may write where it lies as soon as nobody else has it."""
    value = jnp.ones(1000)
    copied(value)
    place = value.unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(value).unsafe_buffer_pointer() == place


@pytest.mark.no_mpi
def test_memory_of_others_is_not_donated():
    memory = aligned(1000, np.float32)
    value = library_of(jnp.ones(1)).from_native(memory, jnp.ones(1000))
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(value)[0] == 2
    assert (memory == 1).all()


@pytest.mark.no_mpi
def test_results_are_where_the_values_are():
    one, other = jax.devices("cpu")[:2]
    value = jax.device_put(jnp.ones(4), other)
    assert copied(value).devices() == {other}
    shards = jax.sharding.NamedSharding(jax.sharding.Mesh([one, other], "x"), jax.sharding.PartitionSpec("x"))
    sharded = jax.device_put(jnp.arange(4.0), shards)
    assert copied(sharded).sharding == shards
    longer = library_of(sharded).from_native(np.ones(3, np.float32), sharded)
    assert longer.devices() == {one}


def test_results_of_another_shape_are_where_the_value_is(comm):
    value = jax.device_put(jnp.ones((2, 3)), jax.devices("cpu")[1])
    with Strategy(comm=comm) as strategy:
        results = (strategy.gather(value, 0), strategy.reduce("sum", value, axis=0))
    assert [result.shape for result in results] == [(2 * comm.size, 3), (3,)]
    assert all(result.devices() == value.devices() for result in results)
    assert jax.jit(lambda x, y: x + y)(results[0][:2], value).tolist() == [[2.0] * 3] * 2


def test_weights_may_be_arrays_of_jax(comm, strategy):
    value, twos = jnp.float32(comm.rank % 2), comm.size // 2
    for dtype in (jnp.int32, jnp.float32, jnp.bfloat16):
        mean = strategy.reduce("mean", value, weight=jnp.asarray(1 + comm.rank % 2, dtype))
        assert float(mean) == pytest.approx(2 * twos / (comm.size + twos))


@pytest.mark.no_mpi
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_arrays_without_numbers_are_refused(transform):
    def double(x):
        return copied(x) * 2

    with pytest.raises(TypeError, match="JAX traces this array, which has no numbers yet: call mpidist outside"):
        transform(double)(jnp.float32(1))


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    "transform",
    [jax.jit, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.vmap(f))],
    ids=["jit", "grad in jit", "jit in grad", "vmap in jit"],
)
def test_variable_in_compiled_function_is_refused(transform, strategy):
    with strategy.scope():
        weights = Variable(np.ones(2, np.float32), name="weights")
    for use in (lambda x: (x * weights).sum(), lambda x: (weights - x).sum()):
        with pytest.raises(TypeError, match="variable 'weights' in a function that JAX compiles would be a constant"):
            transform(use)(jnp.ones((2, 2)))


@pytest.mark.no_mpi
def test_variable_in_function_that_is_not_compiled_has_its_value(strategy):
    with strategy.scope():
        weights = Variable(np.ones(2, np.float32))
    rows = jnp.ones((3, 2))
    for value in (1.0, 5.0):
        weights.assign(np.full(2, value, np.float32))
        np.testing.assert_array_equal(jax.grad(lambda x: (x @ weights).sum())(rows), np.full((3, 2), value))
        np.testing.assert_array_equal(jax.vmap(lambda x: x @ weights)(rows), np.full(3, 2 * value))


@pytest.mark.no_mpi
def test_keys_are_refused():
    with pytest.raises(TypeError, match=r"key<fry>.*Use jax.random.key_data"):
        copied(jax.random.key(0))


@struct.dataclass
class Flax:
    w: Any
    width: int = struct.field(pytree_node=False, default=3)


class Named(NamedTuple):
    w: Any
    b: Any


PYTREES = {
    "dataclass of flax": lambda x: Flax(x, width=5),
    "named tuple": lambda x: Named(x, {"b": (x,)}),
    "frozen dict": lambda x: flax.core.FrozenDict({"w": x}),
    "state of nnx": lambda x: nnx.state(
        nnx.Linear(2, 3, kernel_init=nnx.initializers.constant(x[0]), rngs=nnx.Rngs(0))
    ),
    "state of adam": lambda x: optax.adam(1e-3).update({"w": x}, optax.adam(1e-3).init({"w": x}))[1],
    "state of a chain": lambda x: optax.chain(optax.clip(1.0), optax.trace(0.9)).init({"w": x}),
}


@pytest.mark.parametrize("make", PYTREES.values(), ids=PYTREES)
def test_pytrees_keep_their_form(comm, make):
    own = make(jnp.full(3, comm.rank + 1.0))
    everyone = [make(jnp.full(3, rank + 1.0)) for rank in range(comm.size)]
    with Strategy(comm=comm) as strategy:
        total = strategy.reduce("sum", own)
    assert jax.tree.structure(total) == jax.tree.structure(own)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(total))
    wanted = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *everyone)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other), total, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, total) == jax.tree.map(lambda leaf: leaf.dtype, own)


@pytest.mark.no_mpi
def test_nest_of_a_function_and_its_arguments_keeps_its_form():
    partial = jax.tree_util.Partial(len, np.ones(2), (3.0, None))
    leaves, structure = nest.flatten({"f": partial})
    assert leaves[1:] == [3.0, None]
    assert nest.rebuild({"f": partial}, leaves)["f"].args == partial.args
    assert len(nest.array_names(structure)) == 3


def test_batch_of_several_replicas_has_parts_of_jax(comm):
    batch, num_replicas = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.arange(10)}, 2 * comm.size
    with Strategy(replicas=num_replicas, comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([batch])
        for name, whole in batch.items():
            assert all(isinstance(mine, jax.Array) for mine in part[name].values)
            everyone = comm.allgather([mine.tolist() for mine in part[name].values])
            assert [row for of_rank in everyone for rows in of_rank for row in rows] == whole.tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_low_precision_over_nodes(comm, placement, name, strategy):
    value = jnp.full((2, 3), 0.5).astype(name)
    for result in (strategy.reduce("sum", value), all_reduce(strategy, "sum", value)):
        assert result.dtype == value.dtype
        assert (result.astype("float32") == comm.size / 2).all()


def test_large_results_lie_where_jax_takes_them_without_a_copy(comm, strategy):
    value = {"w": jnp.ones((300, 300)), "b": jnp.ones(100)}
    strategy.reduce("sum", value)  # what is called once leaves no memory behind
    results = [strategy.reduce("sum", value) for _ in range(3)]
    kept = parts_of(strategy).group.result_memory.nbytes
    assert kept >= 3 * value["w"].nbytes  # of copies, one would have been let go at once, for the next to lie there
    assert all((result["w"] == comm.size).all() for result in results)


def test_arrays_of_jax_take_no_results(comm, strategy):
    value = jnp.ones(2)
    with raises_everywhere(comm, InvalidArgumentError, "out 0 cannot be written: arrays of JAX never change"):
        all_reduce(strategy, "sum", value, out=value)
    made = strategy.symmetric_empty_like(Flax(value))
    assert type(made.w) is np.ndarray
    assert all_reduce(strategy, "sum", Flax(value), out=made) is made
    assert made.w.tolist() == [comm.size] * 2
