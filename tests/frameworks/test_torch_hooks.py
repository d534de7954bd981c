"""Calls in hooks of PyTorch: autograd calls them in threads of its own for GPUs, and here for graphs that are deep."""

import re
import threading

import pytest
import torch
from support.replicas import context

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import get_strategy
from mpidist.transport.group.thread_guard import OtherThreadError

DEPTH = 62  # from 60 on, autograd takes a thread of its own for a backward pass inside of a backward pass

pytestmark = pytest.mark.ranks(2)


class Nested(torch.autograd.Function):
    """The identity, whose backward pass makes another one."""

    @staticmethod
    def forward(ctx, x, depth, hook):
        ctx.depth, ctx.hook = depth, hook
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            (Nested.apply(x, ctx.depth - 1, ctx.hook) if ctx.depth else x * 2).backward()
        if not ctx.depth:
            ctx.hook()
        return gradient, None, None


def call_in_backward(hook):
    """Call a hook in a thread of autograd, which this one waits for."""
    threads = []

    def noting():
        threads.append(threading.current_thread())
        hook()

    x = torch.ones(1, requires_grad=True)
    Nested.apply(x, DEPTH, noting).backward()
    assert threads != [threading.current_thread()]


def test_calls_go_to_the_thread_of_a_hook_and_back(comm):
    """In each step: started ones, too, which the program then waits for."""
    started = []

    def step():
        ctx, gradient = context(), torch.full((3,), float(comm.rank))

        def reduce():
            with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
                strategy.reduce("sum", 1.0)
            assert ctx.all_reduce("sum", gradient).tolist() == [1.0] * 3
            started.append(ctx.start_all_reduce("sum", gradient, out=gradient))

        call_in_backward(reduce)
        assert started.pop().wait() is gradient
        assert gradient.tolist() == [1.0] * 3
        assert ctx.all_reduce("max", comm.rank) == 1

    with Strategy(comm=comm) as strategy:
        for _ in range(3):
            strategy.run(step)
            assert strategy.reduce("sum", 1.0) == 2
            call_in_backward(lambda: started.append(strategy.reduce("sum", 1.0)))
            assert started.pop() == 2


def test_hook_current_context_is_that_of_the_step(comm):
    found = []

    def step():
        call_in_backward(lambda: found.append(context().all_reduce("sum", 1.0)))

    with Strategy(comm=comm) as strategy:
        strategy.run(step)
        with strategy.scope():
            call_in_backward(lambda: found.append(get_strategy().reduce("sum", 1.0)))
    assert found == [2, 2]


@pytest.mark.parametrize("first", ["hook", "own"])
@pytest.mark.parametrize("last", ["hook", "own"])
def test_hook_calls_return_to_the_thread_and_after_its_end_to_the_first(comm, first, last):
    found = []

    def call():
        found.append(strategy.reduce("sum", 1.0))

    def train():
        for where in (first, last):
            call_in_backward(call) if where == "hook" else call()

    with Strategy(comm=comm) as strategy:
        thread = threading.Thread(target=train, name="trainer")
        thread.start()
        thread.join()
        call()
    assert found == [2, 2, 2]


def test_other_threads_are_refused_in_the_hook_and_after_it(comm):
    refused = []

    def call():
        with pytest.raises(OtherThreadError) as raised:
            strategy.reduce("sum", 1.0)
        refused.append(str(raised.value))

    def call_in_another():
        thread = threading.Thread(target=call, name="loader")
        thread.start()
        thread.join()

    def hook():
        assert strategy.reduce("sum", 1.0) == 2
        call_in_another()

    with Strategy(comm=comm) as strategy:
        call_in_backward(hook)
        call_in_another()
        assert strategy.reduce("sum", 1.0) == 2
    pattern = r"reduce in thread 'loader', but thread 'MainThread' makes this strategy's calls"
    assert [bool(re.match(pattern, text)) for text in refused] == [True, True], refused
