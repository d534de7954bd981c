"""What becomes of the pushes of a node when one of its workers fails, is killed, or comes too late."""

from __future__ import annotations

import re

import pytest
from jobs.faults import THREE, Ended, Job, Placement, job

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

PROGRAM = """
strategy.close()
options = mpidist.CommunicationOptions(timeout_seconds={timeout})
strategy = mpidist.experimental.ParameterServerStrategy(
    on_worker_lost="{mode}", aggregate_in_node=True, communication_options=options)
STEPS = 30

def work():
    with strategy.scope():
        small = mpidist.Variable(np.zeros(4))
        large = mpidist.Variable(np.zeros(700_000, np.float32))
    ones = np.ones(700_000, np.float32)
    for step in range(STEPS):
        if is_faulty and step == 10:
            {fault}
        strategy.push([small, large], [np.ones(4), ones])
        assert len(set(large.numpy())) == 1  # a snapshot
    strategy.barrier()
    note("end", text=f"{{small.numpy()[0]:g}} {{large.numpy()[0]:g}}")

with strategy:
    if strategy.is_ps:
        strategy.serve()
        note("served")
    else:
        work()
"""
RAISES = 'raise KeyError("mine")'
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
IN_A_PUSH = "threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()"
LATE = "time.sleep(600)"


def program(fault: str, mode: str = "ignore", timeout: float = 600) -> str:
    return PROGRAM.format(fault=fault, mode=mode, timeout=timeout)


def require_rest(ended: Ended, placement: Placement) -> None:
    """Require that all but the faulty worker have made all their pushes, and that what it had pushed is there."""
    workers = placement.size - 1
    value = 30 * (workers - 1) + 10
    assert {note.text for note in ended.of("end").values()} == {f"{value} {value}"}, ended
    assert len(ended.of("end")) == workers - 1
    assert set(ended.of("served")) == {workers}


@pytest.mark.core
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 0, 1, 1)], ids=["one node", "two nodes"])
def test_others_go_on_without_a_worker_that_raises(job: Job, nodes: tuple[int, ...], faulty: int) -> None:
    """Also without the one that sent the sums."""
    placement = Placement(nodes, faulty)
    ended = job(program(RAISES), placement)
    assert ended.status == 1, ended
    assert ended.err.count("Traceback (most recent call last):") == 1, ended.err
    require_rest(ended, placement)


@pytest.mark.parametrize("faulty", [0, 1])
def test_others_go_on_without_a_worker_that_is_killed(job: Job, faulty: int) -> None:
    placement = Placement((0, 0, 0, 0), faulty)
    ended = job(program(KILLED), placement, is_blind=True)
    assert ended.status == 75, ended
    assert "Traceback" not in ended.err
    require_rest(ended, placement)


@pytest.mark.parametrize("faulty", [0, 1])
def test_nobody_hangs_where_a_worker_is_killed_in_a_push(job: Job, faulty: int) -> None:
    """What it had pushed may be made, or not."""
    placement = Placement((0, 0, 0, 0), faulty)
    ended = job(program(IN_A_PUSH), placement, is_blind=True)
    assert ended.status == 75, ended
    assert "Traceback" not in ended.err
    assert len(ended.of("end")) == 2, ended


def test_a_killed_worker_ends_the_job_where_nobody_goes_on(job: Job) -> None:
    ended = job(program(KILLED, "abort"), THREE, is_blind=True)
    assert ended.status not in (0, 75), ended
    assert "PeerFailedError" in ended.err
    assert not ended.of("end")


def test_a_late_worker_is_named(job: Job) -> None:
    ended = job(program(LATE, "abort", timeout=4), Placement((0, 0, 0, 0), 1))
    assert ended.status != 0
    late = r"DeadlineExceededError: push\(\) on rank [02] waited 4 s, and rank 1 of 4 ranks does not answer"
    assert re.search(late, ended.err), ended
    assert not ended.of("end")
