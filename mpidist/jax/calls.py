"""Sums, means, minima and maxima over ranks inside functions that JAX transforms: jit, scan, grad, vmap.

`import mpidist.jax` before JAX computes anything: it makes JAX's dispatch on the CPU synchronous, so that a rank makes
the calls inside and outside of compiled functions in the order of its program. Needs no Optax but for `across_ranks`.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.callback import _OrderedIOEffect as _ORDER
from jax._src.interpreters.pxla import ExecuteReplicated
from jax._src.xla_bridge import backends_are_initialized
from jax.experimental import io_callback

from mpidist import context_stack
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.options import ReduceOp
from mpidist.transport.shared_errors import is_of_callback, note_callback_error

if TYPE_CHECKING:
    import optax

__all__ = ["across_ranks", "pmax", "pmean", "pmin", "psum"]

_GRADIENT: Final = "gradient of "
_ASYNCHRONOUS: Final = "jax_cpu_enable_async_dispatch"
_EXECUTE: Final = inspect.unwrap(ExecuteReplicated.__call__).__code__  # where a thread waits for a compiled function


def psum(tree: Any) -> Any:
    """Add the arrays of all ranks. Collective: one call for the whole tree, over the ranks of the current strategy.

    Works inside `strategy.run` and `strategy.scope()`, and inside `jax.jit`, `lax.scan`, `lax.cond`, `jax.grad` and
    `jax.vmap`. The gradient of a sum over ranks is the sum of the ranks' gradients; `vmap` makes one call for all rows.

    Args:
        tree: A pytree of arrays and numbers of the same structure, shapes and dtypes on every rank. Booleans are
            counted as int32; leaves of dtype `float0` stay as they are.

    Returns:
        A tree like `tree`, the same on all ranks.

    Raises:
        InvalidArgumentError: If numbers of a dtype cannot be reduced. If the ranks' arguments or calls differ: on every
            rank. Inside `run` and `scope()` a compiled function raises JAX's `JaxRuntimeError`, with this error's text.
        RuntimeError: If no strategy is current, or the current one has no ranks in lock step with one replica each.
        TypeError: If a leaf is no array of numbers.
    """
    return _all_reduce(ReduceOp.SUM, "psum", tree)


def pmean(tree: Any) -> Any:
    """Average the arrays of all ranks. Collective: as `psum`, and the gradient is the mean of the ranks' gradients.

    Each rank counts the same. For parts of different lengths, divide a `psum` of sums by a `psum` of lengths. The mean
    of integers and booleans is float32, or float64 where JAX has it.
    """
    return _all_reduce(ReduceOp.MEAN, "pmean", tree)


def pmax(tree: Any) -> Any:
    """Return the largest number over all ranks, element by element. Collective: as `psum`, but without a gradient."""
    return _all_reduce(ReduceOp.MAX, "pmax", tree)


def pmin(tree: Any) -> Any:
    """Return the smallest number over all ranks, element by element. Collective: as `psum`, but without a gradient."""
    return _all_reduce(ReduceOp.MIN, "pmin", tree)


def across_ranks() -> optax.GradientTransformation:
    """Make a transformation for `optax.chain` whose update, a collective `pmean`, averages the gradients of all ranks.

    Put it first, outside of `optax.apply_if_finite`: so all ranks clip, scale, accumulate and skip the same gradients.
    """
    import optax

    return optax.stateless(lambda updates, params: pmean(updates))


def _all_reduce(op: ReduceOp, function: str, tree: Any) -> Any:
    call = f"mpidist.jax.{function}"
    _parts_of(threading.current_thread(), call)  # also before JAX compiles: the traceback shows the line of the call
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in getattr(mesh, "manual_axes", ())):
        raise RuntimeError(
            f"{call}: inside jax.shard_map or jax.pmap, each of {mesh.size} devices would make the call, in another "
            "order on each rank; combine the devices with jax.lax.psum, and make the call outside"
        )
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "array" for path, _ in paths]
    if len({*names}) < len(names):
        names = [f"{name} ({at})" for at, name in enumerate(names)]
    values = dict(zip(names, (leaf for _, leaf in paths), strict=True))
    have_numbers = (one for one in values.items() if getattr(one[1], "dtype", None) != jax.dtypes.float0)
    numbers = {name: _array(op, f"{call}: {name}", leaf) for name, leaf in have_numbers}
    return jax.tree.unflatten(structure, (values | _traceable(op, call)(numbers)).values())


def _array(op: ReduceOp, name: str, leaf: Any) -> Any:
    """Return a leaf as an array of JAX of a dtype that `op` takes."""
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.extended):
        raise TypeError(f"{name}: {leaf.dtype} is no dtype of numbers; pass jax.random.key_data(key)")
    try:
        array = jnp.asarray(leaf)
        if array.dtype == np.bool_ and op in (ReduceOp.SUM, ReduceOp.MEAN):
            array = array.astype(np.int32)
        _result_dtype(op, array)
    except (TypeError, InvalidArgumentError) as problem:
        raise type(problem)(f"{name}: {problem}") from None
    return array


def _result_dtype(op: ReduceOp, value: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(wire_and_result_dtypes(op, value.dtype)[1])


@cache
def _traceable(op: ReduceOp, call: str) -> Any:
    """Return the all-reduce of arrays by name that JAX traces, batches and differentiates.

    The same for equal calls, so that JAX compiles them once.
    """
    reduce = partial(_reduce, op, call)

    def primal(values: Mapping[str, Any]) -> Any:
        results = {name: jax.ShapeDtypeStruct(one.shape, _result_dtype(op, one)) for name, one in values.items()}
        return io_callback(reduce, results, values, ordered=True)

    def forward(values: Mapping[str, Any]) -> Any:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            raise NotImplementedError(f"{call} has no gradient: pass it jax.lax.stop_gradient(x)")
        is_inexact = {name: () for name, one in values.items() if jnp.issubdtype(one.dtype, jnp.inexact)}
        return differentiable(values), is_inexact

    def backward(is_inexact: Mapping[str, Any], cotangents: Mapping[str, Any]) -> Any:
        gradient = _traceable(op, call if call.startswith(_GRADIENT) else _GRADIENT + call)
        return ({**dict.fromkeys(cotangents), **gradient({name: cotangents[name] for name in is_inexact})},)

    batchable = jax.custom_batching.custom_vmap(primal)
    batchable.def_vmap(lambda size, is_batched, values: (batchable(values), is_batched[0]))
    differentiable = jax.custom_vjp(lambda values: batchable(values))
    differentiable.defvjp(forward, backward)
    return differentiable


def _reduce(op: ReduceOp, call: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reduce arrays that have numbers: JAX calls it, and makes new arrays of the results.

    These are NumPy's, as JAX's own could wait for the thread that makes them.
    """
    caller = None
    try:
        caller = _caller(call)
        parts = _parts_of(caller, call)
        arrays = {name: np.asarray(value) for name, value in values.items()}
        is_here = caller is threading.current_thread()
        with nullcontext() if is_here else parts.group.lent_to_this_thread(call, caller):
            results = parts.cross_device_ops.all_reduce(op, arrays, call=call)
    except BaseException as error:
        note_callback_error(error, jax.errors.JaxRuntimeError, None if caller is None else caller.ident)
        raise
    return {name: np.asarray(results[name], _result_dtype(op, one)) for name, one in arrays.items()}


def _parts_of(thread: threading.Thread, call: str) -> Any:
    """Return the parts of the strategy whose `run` or `scope` a thread is in."""
    entry = context_stack.innermost_of(thread)
    if entry is None:
        raise RuntimeError(
            f"{call}: no strategy is current, so that there are no ranks to combine; call the function by "
            "strategy.run(), or inside `with strategy.scope():`"
        )
    parts = context_stack.parts_of(entry.strategy)
    if not parts.peers.is_in_lock_step or parts.replicas.tree is not None:
        raise RuntimeError(f"{call}: {entry.strategy} has no ranks in lock step with one replica each")
    if jax.default_backend() != "cpu":
        raise RuntimeError(
            f"{call}: JAX computes on {jax.default_backend()}, and its calls inside compiled functions are those of "
            "the CPU; reduce the results of the compiled function, or set JAX_PLATFORMS=cpu"
        )
    return parts


def _caller(call: str) -> threading.Thread:
    """Return the thread that called the compiled function, and waits for it: this one, or this is a thread of JAX."""
    this = threading.current_thread()
    if not isinstance(this, threading._DummyThread):
        return this
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if _waits(frames.get(thread.ident or 0))]
    if this in threads:
        return this
    if len(threads) != 1:
        raise RuntimeError(
            f"{call}: JAX makes this call in a thread of its own, and needed is one thread that waits for a compiled "
            f"function, got {len(threads)}; let one thread alone run functions that call mpidist.jax, on one device"
        )
    return threads[0]


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for a compiled function with calls of Python like those here, which have an order."""
    while frame is not None and not (frame.f_code is _EXECUTE and _ORDER in frame.f_locals["self"].ordered_effects):
        frame = frame.f_back
    return frame is not None


def _dispatch_synchronously() -> None:
    """Make compiled functions return only when they have ended: else their calls and later ones would have no order."""
    if not jax.config.read(_ASYNCHRONOUS):
        return
    if backends_are_initialized():
        raise RuntimeError(
            "import mpidist.jax before JAX computes anything: JAX's dispatch on the CPU must be synchronous from the "
            f'start. Or begin the program with jax.config.update("{_ASYNCHRONOUS}", False)'
        )
    jax.config.update(_ASYNCHRONOUS, False)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of JAX is not about an error that `run` or `scope()` will raise."""
    return not (record.exc_info and is_of_callback(record.exc_info[1]))


_dispatch_synchronously()
logging.getLogger("jax._src.callback").addFilter(_is_news)
