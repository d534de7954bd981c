"""Arrays of more than 2^31 elements: more than an MPI call counts, and than Open MPI sends in one."""

import numpy as np
import pytest

from mpidist import CommunicationOptions
from mpidist.context_stack import parts_of

pytestmark = [pytest.mark.core, pytest.mark.ranks(2), pytest.mark.long]

COUNT = 2**31 + 9
MARKS = [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, COUNT - 1]  # ends of messages, and of the numbers of 32 bits


@pytest.fixture(scope="module")
def memory():
    """One array for all tests: 2 GiB on each of two ranks is enough to ask for."""
    return np.empty(COUNT, np.int8)


def is_filled(array, filling, marks):
    """Whether an array holds one number but for the marks, without a temporary array as large."""
    found = array[MARKS].tolist() == marks
    array[MARKS] = filling
    return found and array.min() == array.max() == filling


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_all_reduce_in_place(strategy, memory, implementation):
    memory[...] = 1
    memory[MARKS] = [rank + strategy.topology.rank for rank in range(6)]
    ops = parts_of(strategy).cross_device_ops
    ops.all_reduce("SUM", memory, CommunicationOptions(implementation=implementation), out=memory)
    assert is_filled(memory, 2, [1, 3, 5, 7, 9, 11])


def test_large_arrays_are_right_in_other_calls(strategy, memory):
    """On the transport itself, which works in place."""
    world, rank = parts_of(strategy).group.levels.world, strategy.topology.rank
    memory[...] = rank
    memory[MARKS] = range(10 * rank, 10 * rank + 6)
    world.broadcast(memory, 1)
    assert is_filled(memory, 1, [10, 11, 12, 13, 14, 15])
    half = (COUNT + 1) // 2
    own = memory[:half] if rank == 0 else memory[half:]
    own[...] = rank + 5
    world.all_gather(memory)
    assert memory[:half].min() == memory[:half].max() == 5
    assert memory[half:].min() == memory[half:].max() == 6
    if rank == 0:
        world.send_receive(memory, 1, memory[:0], 1)
    else:
        memory[...] = 0
        world.send_receive(memory[:0], 0, memory, 0)
        assert (memory[0], memory[half - 1], memory[half], memory[-1]) == (5, 5, 6, 6)
