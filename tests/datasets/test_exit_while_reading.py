"""Programs that end while a thread reads ahead: at once, with their own exit code, and without a word of the thread."""

import pytest
from jobs.failing import LONG_SECONDS

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

# One pass is left by `break`, and one is held until the end. A reader of 0 s waits for a place, or is in NumPy.
PROGRAM = """
import numpy as np

class Batches:
    def __iter__(self):
        for step in range(1_000_000):
            if step > 2:
                time.sleep({seconds})
            yield np.sort(np.random.default_rng(step).random(2_000))

options = mpidist.InputOptions(experimental_per_replica_buffer_size={buffer_size})
dataset = strategy.experimental_distribute_dataset(Batches(), options)
for part in dataset:
    break
steps = iter(dataset)
next(steps)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "seconds", "buffer_size"),
    [
        ("", 0, 0, 100_000),
        ("strategy.close()", 0, LONG_SECONDS, 8),
        ("strategy.close(); sys.exit(3)", 3, 0, 3),
        ("steps = None", 0, LONG_SECONDS, 8),
    ],
    ids=["end of program", "closed", "sys.exit", "pass that was left"],
)
def test_reader_keeps_no_program_from_ending(job, end, status, seconds, buffer_size):
    ended = job(PROGRAM.format(seconds=seconds, buffer_size=buffer_size, end=end), ranks=2)
    assert ended.status == status, ended.err
    assert ended.err.count("Traceback") == (status != 0), ended.err  # that of `sys.exit`
    assert not any(word in ended.err for word in ("Thread", "Fatal", "read_ahead")), ended.err


def test_exception_ends_the_job_while_threads_read(job):
    end = "if rank == 1: raise ValueError('mine')\nreduce_for_ever()"
    ended = job(PROGRAM.format(seconds=LONG_SECONDS, buffer_size=8, end=end), ranks=2)
    assert ended.status not in (0, None)
    assert ended.lines_of(1)[-1] == "ValueError: mine"
    assert ended.err.count("Traceback") == 1, ended.err
    assert not any(word in ended.err for word in ("Thread", "Fatal", "read_ahead")), ended.err
