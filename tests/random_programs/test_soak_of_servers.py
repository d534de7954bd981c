"""Programs that train for weeks: nothing grows on workers and servers with the number of requests.

`TEST_SOAK_CALLS` says how many requests.
"""

import os
import random
from typing import Any

import numpy as np
import pytest
from mpi_session import HANG_SECONDS
from parameter_server.clusters import num_workers, on_workers
from support.used import Used

from mpidist import IndexedSlices, Variable
from mpidist.experimental import server_rules

NUM_REQUESTS = int(os.environ.get("TEST_SOAK_CALLS", "100000"))
NOISE_BYTES = 3 << 20  # what the allocator may keep
NOISE_BLOCKS = 2000  # objects of Python's own: caches, frames, interned strings. Of 50,000 requests, some of each kind
LARGE = 150_000  # numbers, in two messages
Array = np.ndarray[Any, Any]


@server_rules.register("soak: measure")
def measure(value, gradient, memory):
    value[...] = Used.now()


@server_rules.register("soak: fail")
def fail(value, gradient, memory):
    raise ValueError("no such gradient")


def kinds_of_requests(strategy):
    """Make variables, and list what is asked of them, each with a weight."""
    with strategy.scope():
        small, rows, large = Variable(np.zeros(2)), Variable(np.zeros((40, 3))), Variable(np.zeros(LARGE))
        many = [Variable(np.zeros(size)) for size in range(1, 13)]
    draw, delta = random.Random(strategy.topology.rank), np.ones(LARGE)
    adam, failing = server_rules.Adam(), server_rules.Registered("soak: fail")

    def some():
        return draw.sample(many, draw.randint(2, 6))  # of more lists than a server remembers

    def fail_on_the_server():
        strategy.push(small, np.zeros(2), failing)
        strategy.flush()

    def expect_failure():
        with pytest.raises(RuntimeError, match="no such gradient"):
            fail_on_the_server()

    return [
        (300, lambda: small.assign_add(1.0)),
        (300, small.read_value),
        (50, lambda: rows.scatter_add(IndexedSlices(np.ones((3, 3)), [0, 7, 7]))),
        (50, lambda: rows.sparse_read([1, 2, 39])),
        (50, lambda: strategy.read(some())),
        (50, lambda: strategy.push(list(many), [1.0] * len(many), adam)),
        (50, strategy.step_done),
        (3, lambda: large.assign_add(delta)),
        (3, large.read_value),
        (3, expect_failure),
    ]


@pytest.mark.ranks(2, 3)
@pytest.mark.timeout(5 * HANG_SECONDS)
def test_soak_of_servers_grows_no_resource(comm):
    def work(strategy):
        weights, calls = zip(*kinds_of_requests(strategy), strict=True)
        with strategy.scope():
            meters = [Variable(np.zeros(len(Used._fields))) for _ in range(strategy.num_ps)]
        draw, used = random.Random(7), []
        for _ in range(4):
            for call in draw.choices(calls, weights, k=NUM_REQUESTS // strategy.topology.size // 4):
                call()
            strategy.barrier()
            used.append(Used.now())
            strategy.push(meters, [0.0] * len(meters), server_rules.Registered("soak: measure"))
            used += [Used(*map(int, meter.numpy())) for meter in meters]
            strategy.barrier()
        return used

    found = on_workers(comm, work)
    assert len(found) == num_workers(comm)
    for used in found:
        for who, before, after in zip(("worker", "server"), used[2:4], used[6:8], strict=True):
            text = f"{NUM_REQUESTS // 2} requests, on a {who}: {before} became {after}"
            assert (after.files, after.mapped) == (before.files, before.mapped), text
            assert after.blocks - before.blocks < NOISE_BLOCKS, text
            assert after.resident - before.resident < NOISE_BYTES, text
