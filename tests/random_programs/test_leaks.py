"""Programs that run for weeks: neither memory, nor files, nor shared memory grow with the number of calls.

`TEST_LEAK_CALLS` says how many calls; 2,000 in `make test-all`, else fewer. With 100,000, add `--timeout 1200`.
"""

import os

import numpy as np
import pytest
from support.reductions import all_reduce
from support.used import Used

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.parametrize("placement", ["one node", "uneven"], indirect=True),
    pytest.mark.parametrize("transport", ["mpi", "shared_memory"], indirect=True),
]

NUM_CALLS = int(os.environ.get("TEST_LEAK_CALLS", "300"))
NOISE_BYTES = 3 << 20  # what the allocator may keep
NOISE_BLOCKS = 400  # objects of Python's own: caches, frames, interned strings


def check_growth(work, number, cached=0):
    """Run something a few times, then often, and see that the many times used up nothing but `cached` objects each."""
    for step in range(max(20, number // 4)):
        work(step)
    before = Used.now()
    for step in range(number):
        work(step)
    after = Used.now()
    text = f"{number} times: {before} became {after}"
    assert (after.files, after.mapped) == (before.files, before.mapped), text
    assert after.blocks - before.blocks < NOISE_BLOCKS + number * cached, text
    assert after.resident - before.resident < NOISE_BYTES, text


@pytest.mark.usefixtures("placement", "transport")
def test_calls_leave_nothing_behind(comm):
    """Of all sizes and kinds of arrays."""
    with Strategy(comm=comm) as strategy:
        like = [np.ones(100, np.float32), np.ones((3, 50_000)), np.ones(7, np.int16)]
        symmetric = strategy.symmetric_empty_like(like)
        together = strategy.symmetric_empty_like(like, per_node=True)
        for array in symmetric:
            array[...] = 1
        many = [np.ones(index % 9, np.float32) for index in range(60)]
        calls = [
            lambda: strategy.reduce("MEAN", 1.0),
            lambda: all_reduce(strategy, "SUM", like),
            lambda: all_reduce(strategy, "SUM", many),
            lambda: all_reduce(strategy, "MEAN", like[:2], out=[array.copy() for array in like[:2]]),
            lambda: all_reduce(strategy, "MAX", symmetric, out=symmetric),
            lambda: all_reduce(strategy, "SUM", symmetric),
            lambda: all_reduce(strategy, "SUM", like, out=together),
            lambda: strategy.gather(like[0], 0),
            lambda: strategy.extended.broadcast_to(many, 0),
            lambda: strategy.extended.reduce_to("SUM", like[1], 0),
        ]
        check_growth(lambda step: calls[step % len(calls)](), NUM_CALLS)


@pytest.mark.usefixtures("placement", "transport")
def test_strategies_and_arrays_leave_nothing_behind(comm):
    """Nor do variables, resets, and calls that failed on all ranks."""

    def live(step):
        with Strategy(comm=comm) as strategy:
            arrays = strategy.symmetric_empty_like([np.ones(1000), np.ones(3)], per_node=bool(step % 2))
            all_reduce(strategy, "SUM", [np.ones(1000), np.ones(3)], out=arrays)
            with strategy.scope():
                mpidist.Variable(np.ones(3)).read_value()
            with pytest.raises(mpidist.errors.InvalidArgumentError):
                strategy.reduce("SUM", np.ones(comm.rank))
            strategy.reset()
            strategy.reduce("SUM", np.ones(100_000))

    check_growth(live, max(20, NUM_CALLS // 20))


@pytest.mark.usefixtures("placement", "transport")
def test_variables_that_are_gone_leave_nothing_behind(comm):
    """Those of which a node has one copy, too, while their strategy lives on."""
    with Strategy(comm=comm, per_node_variables=True) as strategy, strategy.scope():

        def live(step):
            variable = mpidist.Variable(np.ones(100_000, np.float32), name="weights", aggregation="SUM")
            strategy.run(lambda: variable.assign_add(np.ones(100_000, np.float32)))
            assert (variable[step] == comm.size + 1).all()

        check_growth(live, max(20, NUM_CALLS // 20), cached=40)  # of 1024 calls: each variable's have another name
