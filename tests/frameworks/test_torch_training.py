"""Whole programs with PyTorch: gradients reduced in place, weights, states and symmetric gradients."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def model_of(dtype: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(dtype)


def gradients_of(model: Any, rank: int, dtype: Any) -> list[Any]:
    """Compute gradients that are small whole numbers, whose sums are exact in bfloat16."""
    model.zero_grad()
    x = torch.full((2, 4), float(rank % 2 + 1), dtype=dtype)
    (model(x) - model(x).detach() + 1).sum().backward()
    for parameter in model.parameters():
        parameter.grad.round_().clamp_(-8, 8)
    return [parameter.grad for parameter in model.parameters()]


@each_dtype
def test_gradients_are_reduced_in_place(comm: Intracomm, placement: tuple[int, ...], dtype: Any) -> None:
    model, reference = model_of(dtype), model_of(dtype)
    everyone = [[g.clone().float() for g in gradients_of(reference, rank, dtype)] for rank in range(comm.size)]
    wanted = [sum(parts[1:], parts[0]).to(dtype) for parts in zip(*everyone, strict=True)]
    with Strategy(comm=comm) as strategy:
        for _ in range(3):
            gradients = gradients_of(model, comm.rank, dtype)
            places = [gradient.data_ptr() for gradient in gradients]
            result = all_reduce(strategy, "sum", gradients, out=gradients)
            assert result is gradients
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
            assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), wanted))
        total = all_reduce(strategy, "sum", gradients_of(model, comm.rank, dtype))
        assert [(type(one), one.dtype) for one in total] == [(torch.Tensor, dtype)] * 4
        assert all(map(torch.equal, total, wanted))


@each_dtype
def test_symmetric_gradients_are_tensors(comm: Intracomm, placement: tuple[int, ...], dtype: Any) -> None:
    model = model_of(dtype)
    with Strategy(comm=comm) as strategy:
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


def test_one_tensor_for_a_node(comm: Intracomm) -> None:
    with Strategy(comm=comm) as strategy:
        one = strategy.symmetric_empty_like(torch.ones(5), per_node=True)
        assert all_reduce(strategy, "sum", torch.ones(5), out=one) is one
        assert one.tolist() == [comm.size] * 5


def test_weights_and_states_keep_their_form(comm: Intracomm) -> None:
    model = model_of(torch.float32, seed=comm.rank)
    first = model_of(torch.float32, seed=0)
    with Strategy(comm=comm) as strategy:
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
def test_a_compiled_step_calls_what_is_not_compiled(comm: Intracomm) -> None:
    """As the page on PyTorch advises: mpidist cannot be traced. Importing the compiler takes seconds."""
    weights = torch.zeros(3, requires_grad=True)
    with Strategy(comm=comm) as strategy:

        @torch.compiler.disable
        def add_up(gradient: Any) -> None:
            all_reduce(strategy, "sum", gradient, out=gradient)

        def step(x: Any) -> Any:
            (weights * x).sum().backward()
            add_up(weights.grad)
            return x + weights.grad

        compiled = torch.compile(step, backend="eager")
        for factor in (1.0, 2.0):
            weights.grad = None
            assert compiled(torch.full((3,), factor)).tolist() == [factor * (1 + comm.size)] * 3


def test_a_mean_of_counts_is_a_tensor_of_floats(comm: Intracomm) -> None:
    with Strategy(comm=comm) as strategy:
        mean = strategy.reduce("mean", torch.tensor(comm.rank))
        assert (mean.dtype, mean.item()) == (torch.float64, (comm.size - 1) / 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_weights_may_be_tensors(comm: Intracomm, dtype: Any) -> None:
    value, weight = torch.tensor(comm.rank % 2.0), torch.tensor(1 + comm.rank % 2, dtype=dtype)
    twos = comm.size // 2
    with Strategy(comm=comm) as strategy:
        mean = strategy.reduce("mean", value, weight=weight)
        assert mean.item() == pytest.approx(2 * twos / (comm.size + twos))
        weight = torch.nn.Parameter(torch.ones(()))
        assert strategy.reduce("mean", value, weight=weight).item() == pytest.approx(twos / comm.size)
        with raises_everywhere(comm, TypeError, "weight must be a number for each replica: .* pass tensor.detach"):
            strategy.reduce("mean", value, weight=weight * 2)


@each_dtype
def test_each_replica_of_a_rank_gets_its_part_of_a_tensor(comm: Intracomm, dtype: Any) -> None:
    total = 2 * comm.size
    with Strategy(comm=comm, replicas=total) as strategy:
        parts = strategy.run(
            lambda: mpidist.get_replica_context().reduce_scatter("sum", torch.ones(2 * total, 3, dtype=dtype))
        )
    for part in parts.values:
        assert torch.equal(part, torch.full((2, 3), float(total), dtype=dtype))


def test_tensors_of_any_layout_take_results(comm: Intracomm) -> None:
    with Strategy(comm=comm) as strategy:
        turned = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t()
        assert all_reduce(strategy, "sum", turned, out=turned) is turned
        assert turned.tolist() == (np.arange(6.0).reshape(2, 3).T * comm.size).tolist()
        target = torch.zeros(3, dtype=torch.float64)
        assert all_reduce(strategy, "sum", np.ones(3), out=target) is target
        assert target.tolist() == [comm.size] * 3


ones = torch.ones
MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("value", "out", "kind", "text"),
    [
        (lambda: ones(3), lambda: ones(3).bfloat16(), InvalidArgumentError, r"f32\[3\], got bf16\[3\]"),
        (lambda: ones(3), lambda: ones(1).expand(3), InvalidArgumentError, "elements that share memory"),
        (lambda: [None], lambda: None, TypeError, r"\[0\] is None, .*: leave the place out, .* or pass zeros"),
        (lambda: MODEL.parameters(), lambda: None, TypeError, r"read once, so pass list\(\.\.\.\) of it"),
        (lambda: MODEL, lambda: None, TypeError, r"Linear.*pass its state_dict\(\)"),
        (lambda: torch.eye(2).to_sparse(), lambda: None, TypeError, r"pass tensor.to_dense\(\)"),
    ],
)
def test_what_cannot_be_is_told_on_every_rank(comm: Intracomm, value: Any, out: Any, kind: Any, text: str) -> None:
    with Strategy(comm=comm) as strategy:
        with raises_everywhere(comm, kind, text):
            all_reduce(strategy, "sum", value(), out=out())
        assert all_reduce(strategy, "sum", torch.ones(1)).item() == comm.size  # and the strategy is usable


@pytest.mark.ranks(min=2)
def test_ranks_with_other_dtypes_are_told(comm: Intracomm) -> None:
    dtype = torch.bfloat16 if comm.rank else torch.float16
    with Strategy(comm=comm) as strategy, raises_everywhere(comm, InvalidArgumentError, r"f16\[2\].*bf16\[2\]"):
        strategy.reduce("sum", torch.ones(2, dtype=dtype))
