"""Steps that an exception leaves: on one rank, so that the ranks are in different steps, or on all ranks."""

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.calls import every_call
from support.everywhere import raises_everywhere

from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist import get_replica_context
from mpidist.errors import InvalidArgumentError, PeerFailedError

pytestmark = pytest.mark.core
several = pytest.mark.ranks(min=2)

NUM_STEPS = 4  # after the first, repeated calls are carried out in compiled code


def all_reduce(value=1.0):
    return get_replica_context().all_reduce("sum", value)


def leave_step(strategy, leaves=True):
    """Leave a step that makes no call by an exception, and catch that outside, if `leaves`."""

    def step():
        if leaves:
            raise FloatingPointError("loss is NaN")

    with suppress(FloatingPointError):
        strategy.run(step)


@several
@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("traced", [False, True])
def test_step_that_one_rank_leaves_is_an_error_of_all_until_a_reset(comm, tmp_path, traced, strategy):
    leaver = comm.size - 1
    trace = strategy.trace(comm.bcast(str(tmp_path))) if traced else None
    if trace is not None:
        trace.__enter__()

    def step(batch):
        if comm.rank == leaver and batch == NUM_STEPS:
            raise FloatingPointError("loss is NaN")
        return all_reduce(np.full(3, batch))

    for batch in range(NUM_STEPS):
        assert (strategy.run(step, args=(batch,)) == batch * comm.size).all()
    if comm.rank == leaver:
        with pytest.raises(FloatingPointError):
            strategy.run(step, args=(NUM_STEPS,))
    how = r"by FloatingPointError \(loss is NaN\), and then called all_reduce"
    who = rf"rank {leaver} left step {NUM_STEPS + 1} {how}"
    for again in ("^call", "^an earlier call failed.*call"):
        with raises_everywhere(comm, InvalidArgumentError, rf"{again} \d+: {who}; ranks? 0.* left none.*raise_tog"):
            strategy.run(step, args=(NUM_STEPS + (comm.rank == leaver),))
    strategy.reset()
    assert (strategy.run(step, args=(7,)) == 7 * comm.size).all()
    if trace is not None:
        trace.__exit__(None, None, None)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", ["even"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_step_that_one_rank_leaves_is_found_by_every_call(comm, tmp_path, strategy):
    folder = Path(comm.bcast(str(tmp_path)))
    for name in every_call(strategy, folder):
        call = every_call(strategy, folder)[name]
        if "trace" not in name and "restore" not in name:  # of which the first one has no second one, or no files
            call()
        leave_step(strategy, comm.rank == 1)
        with raises_everywhere(comm, InvalidArgumentError, rf"rank 1 left step \d+ .*, and then called {name}"):
            call()
        strategy.reset()


@pytest.mark.ranks(3)
def test_step_that_all_ranks_leave_goes_on(comm, strategy):
    def step(is_bad):
        started = [get_replica_context().start_all_reduce("sum", np.full(count, 1.0)) for count in (3, 20_000)]
        if is_bad:
            raise ValueError(f"a text of rank {comm.rank}")
        return started[0].wait()

    for batch in range(6):
        try:
            assert (strategy.run(step, args=(batch % 2 == 1,)) == comm.size).all()
        except ValueError:
            assert batch % 2
    assert strategy.reduce("sum", 1.0) == comm.size


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_shared", [False, True])
def test_step_that_one_rank_leaves_is_an_error_after_one_that_all_left(comm, is_shared, strategy):
    if is_shared:
        with raises_everywhere(comm, InvalidArgumentError, "array 0"):
            strategy.run(all_reduce, args=(np.ones(2 + (comm.rank == 1)),))
    else:
        leave_step(strategy)
    leave_step(strategy, comm.rank == 1)
    who = r"rank 1 left 2 steps, the last one step 2 by FloatingPointError \(loss is NaN\), and then called all_reduce"
    with raises_everywhere(comm, InvalidArgumentError, rf"ranks 0, 2 left step 1 by .*; {who}, so nothing was sent"):
        strategy.run(all_reduce)


@pytest.mark.ranks(3)
def test_step_continues_after_a_caught_or_shared_exception(comm, strategy):
    def step(how):
        with strategy.raise_together("a step") if how == "told" else pytest.raises(KeyError):
            if comm.rank == 0 or how != "told":
                raise KeyError("mine")
        return all_reduce()

    for _ in range(NUM_STEPS):
        assert strategy.run(step, args=("caught",)) == comm.size
        with raises_everywhere(comm, KeyError):
            strategy.run(step, args=("told",))
        with raises_everywhere(comm, KeyError), strategy.raise_together("a step without calls"):
            strategy.run(lambda: {}["mine"] if comm.rank == 1 else None)
        if strategy.is_chief:  # alone, without a collective call
            assert strategy.run(lambda: 3) == 3


@pytest.mark.ranks(2, 3)
def test_call_that_all_ranks_refuse_is_no_step_that_one_leaves(comm, strategy):
    """One of them made it in a step, and the others outside."""
    for _ in range(2):
        with raises_everywhere(comm, InvalidArgumentError, "did not pass the same arguments"):
            strategy.run(all_reduce) if comm.rank else strategy.barrier()
    assert strategy.reduce("sum", 1.0) == comm.size


@pytest.mark.ranks(2, 3)
def test_close_after_a_step_left_by_one_rank_names_it(comm):
    strategy = MultiWorker(comm=comm)
    leave_step(strategy, comm.rank == 1)
    text = "rank 1 closed the strategy, after an exception was caught that had left step 1 by FloatingPointError"
    if comm.rank != 1:
        with pytest.raises(PeerFailedError, match=re.escape(text)):
            strategy.run(all_reduce)
    strategy.close()


def step_of_replicas(strategy, leavers, all_call=False):
    """Make a step that some replicas leave by an exception; the others call only if `all_call`, or none leaves."""

    def step():
        if get_replica_context().replica_id_in_sync_group in leavers:
            raise FloatingPointError("loss is NaN")
        return all_reduce() if all_call or not leavers else None

    return strategy.run(step)


@pytest.mark.ranks(2, 3)
def test_step_that_all_replicas_of_one_rank_leave_is_an_error_of_all(comm):
    with MultiWorker(comm=comm, replicas=2 * comm.size) as strategy:
        step_of_replicas(strategy, range(0))
        with suppress(FloatingPointError):
            step_of_replicas(strategy, range(2, 4))
        with raises_everywhere(comm, InvalidArgumentError, "rank 1 left step 2 by FloatingPointError"):
            step_of_replicas(strategy, range(0))


@pytest.mark.ranks(2, 3)
def test_step_that_a_replica_leaves_while_others_call_goes_on(comm):
    """All ranks raise an error then."""
    with MultiWorker(comm=comm, replicas=2 * comm.size) as strategy:
        for _ in range(2):
            with pytest.raises(FloatingPointError if comm.rank == 1 else InvalidArgumentError):
                step_of_replicas(strategy, range(3, 4), all_call=True)
            assert step_of_replicas(strategy, range(0)).values == (2 * comm.size,) * 2
