"""Lists of tensors that come again are not asked one by one; whatever has become of a tensor meanwhile is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.everywhere import raises_everywhere
from support.reductions import all_reduce, are_repeated

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SIZES = [5, 300, 2, 4000]


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


def tensors_of(dtype: Any = torch.float32) -> list[Any]:
    return [torch.zeros(size, dtype=dtype) for size in SIZES]


def require_sums(strategy: Strategy, tensors: Any, step: int, in_place: bool = True) -> Any:
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
def test_each_call_has_its_own_numbers(
    strategy: Strategy, repeated: list[bool], dtype: Any, in_place: bool, form: Any
) -> None:
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


def test_gradients_that_stay_are_repeated(strategy: Strategy, repeated: list[bool]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    rank, size = strategy.topology.rank, strategy.topology.size
    for _ in range(5):
        model.zero_grad(set_to_none=False)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        own = gradients[-1].clone()
        all_reduce(strategy, "sum", gradients, out=gradients)
        assert torch.equal(gradients[-1], own * size)
    if are_repeated(strategy):
        assert repeated[-2:] == [True, True]


def test_parameters_are_averaged_in_place(strategy: Strategy) -> None:
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors_of()]
    for step in range(1, 5):
        require_sums(strategy, parameters, step)
    assert all(parameter.requires_grad for parameter in parameters)


def move(tensor: Any) -> None:
    tensor.data = torch.zeros(tensor.shape)


def cut(tensor: Any) -> None:
    tensor.resize_(3)


def turn(tensor: Any) -> None:
    tensor.unsqueeze_(0)


def spread(tensor: Any) -> None:
    tensor.set_(torch.zeros(2 * tensor.numel()).untyped_storage(), 0, tensor.shape, (2,))


def retype(tensor: Any) -> None:
    tensor.data = tensor.data.view(torch.int32)


@pytest.mark.parametrize("change", [move, cut, turn, spread, retype])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_becomes_of_a_tensor_is_noticed(strategy: Strategy, change: Any, at: int, in_place: bool) -> None:
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step, in_place)
    change(tensors[at])
    for step in range(5, 10):
        require_sums(strategy, tensors, step, in_place)


def test_memory_that_comes_back_is_written_itself(strategy: Strategy) -> None:
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


def test_another_tensor_in_a_place_is_noticed(strategy: Strategy) -> None:
    tensors = tensors_of()
    for step in range(1, 9):
        require_sums(strategy, tensors, step)
        if step == 4:
            tensors[2] = torch.zeros(2)


def test_what_gets_a_history_is_refused(strategy: Strategy, comm: Intracomm) -> None:
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step)
    weight = torch.ones(300, requires_grad=True)
    if comm.rank == comm.size - 1:
        tensors[1] *= weight
    with raises_everywhere(comm, TypeError if comm.size == 1 else InvalidArgumentError, "PyTorch differentiates"):
        all_reduce(strategy, "sum", tensors, out=tensors)
    require_sums(strategy, tensors_of(), 9)


def test_a_parameter_that_gets_a_history_is_refused(strategy: Strategy) -> None:
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
def test_lists_may_begin_with_a_tensor(strategy: Strategy, comm: Intracomm, make: Any) -> None:
    """Whatever comes after it. One rank has another list, and so notes what the others do not."""
    values = make()
    for step in range(1, 6):
        if comm.rank == comm.size - 1 and step % 2:
            values = make()
        result = all_reduce(strategy, "sum", values)
        for got, value in zip(*(it.values() if isinstance(it, dict) else it for it in (result, values)), strict=True):
            assert bool(np.all(np.asarray(got == value * comm.size)))


def test_a_rank_may_have_arrays_of_numpy(strategy: Strategy, comm: Intracomm) -> None:
    tensors, arrays = tensors_of(), [np.zeros(size, np.float32) for size in SIZES]
    for step in range(1, 7):
        own: list[Any] = arrays if (comm.rank + step // 4) % 2 else tensors
        for one in own:
            one[:] = step * (comm.rank + 1)
        all_reduce(strategy, "sum", own, out=own)
        assert all((one == step * comm.size * (comm.size + 1) // 2).all() for one in own)


def test_symmetric_tensors_are_reduced_where_they_lie(strategy: Strategy) -> None:
    tensors = strategy.symmetric_empty_like(tensors_of())
    private = tensors_of()
    for step in range(1, 6):
        require_sums(strategy, tensors, step)
        require_sums(strategy, private, step)
        require_sums(strategy, tensors, step, in_place=False)


def test_a_mistake_of_one_rank_ends_no_later_call(strategy: Strategy, comm: Intracomm) -> None:
    tensors = tensors_of()
    for step in range(1, 5):
        require_sums(strategy, tensors, step)
    if comm.size > 1:
        with raises_everywhere(comm, ValueError):
            all_reduce(strategy, "sum", tensors[:2] if comm.rank == 0 else tensors)
    for step in range(5, 9):
        require_sums(strategy, tensors, step)


def test_nothing_keeps_tensors_or_their_memory(strategy: Strategy) -> None:
    tensors = tensors_of()
    for step in range(1, 6):
        require_sums(strategy, tensors, step)
    gone = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    arrays = [weakref.ref(array) for array in map(torch.Tensor.numpy, tensors)]
    del tensors
    gc.collect()
    assert [reference() for reference in (*gone, *arrays)] == [None] * 12
