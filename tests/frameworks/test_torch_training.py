"""Reductions of PyTorch's tensors: weights, states and gradients, in place, symmetric, and of lists that come again."""

import gc
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from support.everywhere import raises_everywhere
from support.reductions import all_reduce, are_repeated
from support.replicas import context, replica_id

import mpidist
from mpidist import MirroredStrategy
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def model_of(dtype, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(dtype)


@each_dtype
def test_symmetric_gradients_are_tensors(comm, placement, dtype, strategy):
    model = model_of(dtype)
    made = strategy.symmetric_empty_like(list(model.parameters()))
    for parameter, memory in zip(model.parameters(), made, strict=True):
        assert (memory.shape, memory.dtype, memory.requires_grad) == (parameter.shape, dtype, False)
        parameter.grad = memory
    for step in range(3):
        for memory in made:
            memory.fill_(comm.rank + step)
        assert all_reduce(strategy, "sum", made, out=made) is made
        strategy.barrier()  # another rank adds where it has its turn
        assert all(
            (parameter.grad == sum(range(comm.size)) + comm.size * step).all() for parameter in model.parameters()
        )
    shared = parts_of(strategy).group.shared
    assert shared.places([parameter.grad.view(torch.uint8).numpy() for parameter in model.parameters()]) is not None


def test_one_tensor_for_a_node(comm, strategy):
    one = strategy.symmetric_empty_like(torch.ones(5), per_node=True)
    assert all_reduce(strategy, "sum", torch.ones(5), out=one) is one
    assert one.tolist() == [comm.size] * 5


def test_weights_and_states_keep_their_form(comm, strategy):
    model = model_of(torch.float32, seed=comm.rank)
    first = model_of(torch.float32, seed=0)
    weights = list(model.parameters())
    assert strategy.broadcast(weights, out=weights) is weights
    assert all(map(torch.equal, model.parameters(), first.parameters()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    state = strategy.reduce("mean", model.state_dict())
    assert type(state) is OrderedDict
    assert vars(state) == vars(model.state_dict())
    model.load_state_dict(state)
    named = strategy.reduce("max", dict(model.named_parameters()))
    assert list(named) == list(state)
    assert strategy.gather(torch.full((1, 2), comm.rank), axis=0)[:, 0].tolist() == list(range(comm.size))


@pytest.mark.long
@pytest.mark.ranks(2)
def test_compiled_step_calls_a_function_without_compilation(comm, strategy):
    """As the page on PyTorch advises: mpidist cannot be traced. Importing the compiler takes seconds."""
    weights = torch.zeros(3, requires_grad=True)

    @torch.compiler.disable
    def add_up(gradient):
        all_reduce(strategy, "sum", gradient, out=gradient)

    def step(x):
        (weights * x).sum().backward()
        add_up(weights.grad)
        return x + weights.grad

    compiled = torch.compile(step, backend="eager")
    for factor in (1.0, 2.0):
        weights.grad = None
        assert compiled(torch.full((3,), factor)).tolist() == [factor * (1 + comm.size)] * 3


def test_mean_of_counts_is_a_tensor_of_floats(comm, strategy):
    mean = strategy.reduce("mean", torch.tensor(comm.rank))
    assert (mean.dtype, mean.item()) == (torch.float64, (comm.size - 1) / 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_weights_may_be_tensors(comm, dtype, strategy):
    value, weight = torch.tensor(comm.rank % 2.0), torch.tensor(1 + comm.rank % 2, dtype=dtype)
    twos = comm.size // 2
    mean = strategy.reduce("mean", value, weight=weight)
    assert mean.item() == pytest.approx(2 * twos / (comm.size + twos))
    weight = torch.nn.Parameter(torch.ones(()))
    assert strategy.reduce("mean", value, weight=weight).item() == pytest.approx(twos / comm.size)
    with raises_everywhere(comm, TypeError, "weight must be a number for each replica: .* pass tensor.detach"):
        strategy.reduce("mean", value, weight=weight * 2)


@each_dtype
def test_reduce_scatter_gives_replicas_their_part_of_a_tensor(comm, dtype):
    total = 2 * comm.size
    with Strategy(comm=comm, replicas=total) as strategy:
        parts = strategy.run(
            lambda: mpidist.get_replica_context().reduce_scatter("sum", torch.ones(2 * total, 3, dtype=dtype))
        )
    for part in parts.values:
        assert torch.equal(part, torch.full((2, 3), float(total), dtype=dtype))


def test_batches_of_a_tensor_that_requires_a_gradient_are_differentiated(strategy):
    points = torch.arange(10.0).requires_grad_()
    for part in strategy.experimental_distribute_dataset(mpidist.Batches(points, 4)):
        (gradient,) = torch.autograd.grad((part**2).sum(), part)
        assert torch.equal(gradient, 2 * part)


AUTOCAST = partial(torch.autocast, "cpu", torch.float16, cache_enabled=False)


def modes():
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@pytest.mark.no_mpi
@pytest.mark.parametrize("outer", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode, torch.enable_grad, AUTOCAST])
def test_modes_of_torch_are_those_of_each_replica(enter, outer):
    """Although replicas take turns on one thread; also after an error. Functions of calls run in them, too."""

    def step(fails):
        assert modes() == before
        with enter():
            own = modes()
            assert context().merge_call(lambda _: modes()) == own == modes()
            if fails and replica_id() == 1:
                raise KeyError
            context().all_reduce("sum", torch.ones(2))
        assert modes() == before

    with MirroredStrategy(replicas=3) as strategy, outer():
        before = modes()
        strategy.run(step, (False,))
        with pytest.raises(KeyError):
            strategy.run(step, (True,))
        assert modes() == before


def test_tensors_of_any_layout_take_results(comm, strategy):
    turned = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t()
    assert all_reduce(strategy, "sum", turned, out=turned) is turned
    assert turned.tolist() == (np.arange(6.0).reshape(2, 3).T * comm.size).tolist()
    target = torch.zeros(3, dtype=torch.float64)
    assert all_reduce(strategy, "sum", np.ones(3), out=target) is target
    assert target.tolist() == [comm.size] * 3


def test_tensors_of_each_replica_take_results(comm):
    with Strategy(comm=comm, replicas=2 * comm.size) as strategy:
        outs = strategy.run(lambda: context().all_reduce("sum", torch.ones(3), out=torch.zeros(3)))
        assert [out.tolist() for out in strategy.experimental_local_results(outs)] == [[2.0 * comm.size] * 3] * 2


ones = torch.ones
MODEL = torch.nn.Linear(1, 1)


WRONG = [
    (ones(3), ones(3).bfloat16(), InvalidArgumentError, r"f32\[3\], got bf16\[3\]"),
    (ones(3), ones(1).expand(3), InvalidArgumentError, "elements that share memory"),
    ([None], None, TypeError, r"\[0\] is None, .*: leave the place out, .* or pass zeros"),
    (MODEL.parameters(), None, TypeError, r"read once, so pass list\(\.\.\.\) of it"),
    (MODEL, None, TypeError, r"Linear.*pass its state_dict\(\)"),
    (torch.eye(2).to_sparse(), None, TypeError, r"pass tensor.to_dense\(\)"),
]


def test_all_reduce_wrong_tensors_and_outs_raise_everywhere(comm, strategy):
    for value, out, kind, text in WRONG:
        with raises_everywhere(comm, kind, text):
            all_reduce(strategy, "sum", value, out=out)
        assert all_reduce(strategy, "sum", ones(1)).item() == comm.size  # and the strategy is usable


@pytest.mark.ranks(min=2)
def test_reduce_unlike_dtypes_raises_everywhere(comm):
    dtype = torch.bfloat16 if comm.rank else torch.float16
    with Strategy(comm=comm) as strategy, raises_everywhere(comm, InvalidArgumentError, r"f16\[2\].*bf16\[2\]"):
        strategy.reduce("sum", torch.ones(2, dtype=dtype))


SIZES = [5, 300, 2, 4000]


def tensors_of(dtype=torch.float32):
    return [torch.zeros(size, dtype=dtype) for size in SIZES]


def require_sums(strategy, tensors, step, in_place=True):
    """Reduce tensors, filled with other numbers in each step, and look at the results."""
    rank, size = strategy.topology.rank, strategy.topology.size
    own = list(tensors.values()) if isinstance(tensors, dict) else tensors
    with torch.no_grad():
        for at, tensor in enumerate(own):
            tensor.fill_(step * (rank + 1) + at)
    result = all_reduce(strategy, "sum", tensors, **({"out": tensors} if in_place else {}))
    found = list(result.values()) if isinstance(result, dict) else result
    for at, (got, tensor) in enumerate(zip(found, own, strict=True)):
        assert type(got) is type(tensor) if in_place else type(got) is torch.Tensor
        assert got.dtype == tensor.dtype
        assert (got == step * size * (size + 1) // 2 + at * size).all(), (step, at)
        assert in_place or (tensor == step * (rank + 1) + at).all(), "a value is only read"
    return result


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [list, tuple, dict])
def test_repeated_all_reduce_results_are_separate(strategy, repeated, dtype, in_place, form):
    own = tensors_of(dtype)
    tensors = dict(zip("abcd", own, strict=True)) if form is dict else form(own)
    kept = []
    for step in range(1, 6):
        kept.append(require_sums(strategy, tensors, step, in_place))
    if are_repeated(strategy) and dtype is torch.float32:
        assert repeated[-2:] == [True, True]
    if not in_place:
        size = strategy.topology.size
        first = kept[0]["a"] if form is dict else kept[0][0]
        assert (first == size * (size + 1) // 2).all(), "no later call has written to it"


@pytest.mark.usefixtures("placement")
@each_dtype
def test_gradients_that_stay_are_repeated_in_place(repeated, comm, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)).to(dtype)
    with Strategy(comm=comm) as strategy:
        for _ in range(5):
            model.zero_grad(set_to_none=False)
            model(torch.full((2, 4), comm.rank + 1.0, dtype=dtype)).sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            own, places = gradients[-1].clone(), [gradient.data_ptr() for gradient in gradients]
            first = gradients[0].float() / (comm.rank + 1)  # the same on all ranks
            assert all_reduce(strategy, "sum", gradients, out=gradients) is gradients
            total = comm.size * (comm.size + 1) // 2
            assert torch.allclose(gradients[0].float(), first * total, rtol=0.03, atol=0.01)
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
            assert torch.equal(gradients[-1], own * comm.size)
        if are_repeated(strategy):
            assert repeated[-2:] == [True, True]


def test_parameters_are_averaged_in_place(strategy):
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors_of()]
    for step in range(1, 5):
        require_sums(strategy, parameters, step)
    assert all(parameter.requires_grad for parameter in parameters)


def move(tensor):
    tensor.data = torch.zeros(tensor.shape)


def cut(tensor):
    tensor.resize_(3)


def turn(tensor):
    tensor.unsqueeze_(0)


def spread(tensor):
    tensor.set_(torch.zeros(2 * tensor.numel()).untyped_storage(), 0, tensor.shape, (2,))


def retype(tensor):
    tensor.data = tensor.data.view(torch.int32)


@pytest.mark.parametrize("change", [move, cut, turn, spread, retype])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_repeated_all_reduce_follows_changed_tensors(strategy, change, at, in_place):
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step, in_place)
    change(tensors[at])
    for step in range(5, 10):
        require_sums(strategy, tensors, step, in_place)


def test_memory_that_comes_back_is_written_itself(strategy):
    """And not the memory that a tensor had meanwhile."""
    tensors = tensors_of()
    first = tensors[1].data
    for step in range(1, 5):
        require_sums(strategy, tensors, step)
    tensors[1].data = torch.zeros(300)
    require_sums(strategy, [tensors[1]], 5)
    tensors[1].data = first
    require_sums(strategy, tensors, 6)
    require_sums(strategy, tensors, 7)


def test_another_tensor_in_a_place_is_noticed(strategy):
    tensors = tensors_of()
    for step in range(1, 9):
        require_sums(strategy, tensors, step)
        if step == 4:
            tensors[2] = torch.zeros(2)


def test_repeated_all_reduce_refuses_a_tensor_with_new_history(strategy, comm):
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step)
    weight = torch.ones(300, requires_grad=True)
    if comm.rank == comm.size - 1:
        tensors[1] *= weight
    with raises_everywhere(comm, TypeError if comm.size == 1 else InvalidArgumentError, "PyTorch differentiates"):
        all_reduce(strategy, "sum", tensors, out=tensors)
    require_sums(strategy, tensors_of(), 9)


def test_repeated_all_reduce_refuses_a_parameter_with_new_history(strategy):
    """Its `requires_grad` is what it was."""
    parameter = torch.nn.Parameter(torch.ones(300))
    tensors = [parameter, torch.ones(2)]
    for step in range(1, 5):
        require_sums(strategy, tensors, step, in_place=False)
    parameter.requires_grad_(False)
    parameter.mul_(torch.ones(300, requires_grad=True))
    for more in ({}, {"out": tensors}):
        with pytest.raises(TypeError, match="PyTorch differentiates"):
            all_reduce(strategy, "sum", tensors, **more)


class Own(torch.Tensor):
    """A tensor that answers few questions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.is_complex:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"loss": torch.ones(()), "count": 3},
        lambda: [torch.ones(3), np.ones(3)],
        lambda: [torch.ones(3), np.float32(3)],
        lambda: [torch.ones(3), torch.ones(2).as_subclass(Own)],
        lambda: [torch.ones(3), torch.ones(2, dtype=torch.complex64).conj()],
    ],
)
def test_lists_may_begin_with_a_tensor(strategy, comm, make):
    """Whatever comes after it. One rank has another list, and so notes what the others do not."""
    values = make()
    for step in range(1, 6):
        if comm.rank == comm.size - 1 and step % 2:
            values = make()
        result = all_reduce(strategy, "sum", values)
        for got, value in zip(*(it.values() if isinstance(it, dict) else it for it in (result, values)), strict=True):
            assert bool(np.all(np.asarray(got == value * comm.size)))


def test_repeated_all_reduce_mixes_tensors_and_numpy_arrays(strategy, comm):
    tensors, arrays = tensors_of(), [np.zeros(size, np.float32) for size in SIZES]
    for step in range(1, 7):
        own = arrays if (comm.rank + step // 4) % 2 else tensors
        for one in own:
            one[:] = step * (comm.rank + 1)
        all_reduce(strategy, "sum", own, out=own)
        assert all((one == step * comm.size * (comm.size + 1) // 2).all() for one in own)


def test_symmetric_tensors_are_reduced_where_they_lie(strategy):
    tensors = strategy.symmetric_empty_like(tensors_of())
    private = tensors_of()
    for step in range(1, 6):
        require_sums(strategy, tensors, step)
        require_sums(strategy, private, step)
        require_sums(strategy, tensors, step, in_place=False)


def test_repeated_all_reduce_works_after_a_mistake_of_one_rank(strategy, comm):
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step)
    if comm.size > 1:
        with raises_everywhere(comm, ValueError):
            all_reduce(strategy, "sum", tensors[:2] if comm.rank == 0 else tensors)
    for step in range(5, 9):
        require_sums(strategy, tensors, step)


def test_repeated_all_reduce_keeps_no_tensors_or_memory(strategy):
    tensors = tensors_of()
    for step in range(1, 6):
        require_sums(strategy, tensors, step)
    gone = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    arrays = [weakref.ref(array) for array in map(torch.Tensor.numpy, tensors)]
    del tensors
    gc.collect()
    assert [reference() for reference in (*gone, *arrays)] == [None] * 12
