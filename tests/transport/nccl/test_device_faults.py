"""Ranks that are lost while GPUs wait for them: on emulated GPUs, in jobs of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from host_cuda import are_emulated
from jobs.faults import AT_ONCE_SECONDS, THREE, TWO, Job, Placement, again_if_slow, job, of_others, soon

from mpidist.transport.failures import job_abort

__all__ = ["job"]

pytestmark = [pytest.mark.no_mpi, pytest.mark.gpu, pytest.mark.usefixtures("_emulated")]

DIES_BEFORE_ITS_LAUNCH = """
sys.path.insert(0, os.environ["TESTS"])
from host_cuda.emulated import Emulated, problems
from mpidist.transport import cuda
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.launch_queue import DeviceQueue

emulated, cupy = Emulated(), cuda.current().cupy
cupy.cuda.Device(rank).use()
strategy.reset()

def start():
    value = cupy.asarray(np.ones(9))
    return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", value, options={options}))

def die(*_):
    note("fault")
    os.kill(os.getpid(), signal.{death})
    time.sleep(60)  # this thread goes on until the signal has come, which may be a little later

assert (cupy.asnumpy(start().wait()) == size).all()
if is_faulty:
    DeviceQueue.launch = die
handles = [start(), start()]
attempt("error", handles[0].wait)
attempt("after", handles[1].wait)
nccl_handles.wait_for_endings()
note("log", text=repr((emulated.ended(), problems(), nccl_handles.num_open())))
os._exit({code})
"""


@pytest.fixture
def _emulated() -> None:
    if not are_emulated():
        pytest.skip("needs a GPU that is emulated")


@pytest.mark.parametrize("placement", [TWO, THREE], ids=str)
@again_if_slow
def test_a_rank_dies_before_it_launches_what_it_agreed_to(job: Job, placement: Placement) -> None:
    """Those of its node see it at once, also those whose GPUs have begun."""
    program = DIES_BEFORE_ITS_LAUNCH.format(death="SIGKILL", options="None", code=job_abort.EXIT_CODE_AFTER_FAILURE)
    ended = job(program, placement, is_blind=True, TESTS=str(Path(__file__).parents[2]))
    died = ended.of("fault")[placement.faulty].at
    for error in of_others(ended, "error", placement):
        assert error.kind == "PeerFailedError", error
        assert re.search(gone(placement), error.text), error
        soon(error.at - died, AT_ONCE_SECONDS)
    require_one_abort(ended.of("log"), placement)
    for after in of_others(ended, "after", placement):
        assert "earlier call failed" in after.text


@pytest.mark.parametrize("placement", [TWO, THREE], ids=str)
@again_if_slow
def test_a_rank_is_stopped_before_it_launches_what_it_agreed_to(job: Job, placement: Placement) -> None:
    program = DIES_BEFORE_ITS_LAUNCH.format(death="SIGSTOP", options="DEADLINE", code=0)
    ended = job(program, placement, is_blind=True, TESTS=str(Path(__file__).parents[2]))
    for error in of_others(ended, "error", placement):
        assert error.kind in ("DeadlineExceededError", "PeerFailedError"), error
        assert re.search(rf"rank {placement.faulty} of {placement.size} ranks is stopped", error.text), error
        soon(error.at - error.begun, 1.0 + AT_ONCE_SECONDS)
    require_one_abort(ended.of("log"), placement)


def gone(placement: Placement) -> str:
    """Return how an error names the faulty rank as gone, alone or with one that has had its error and ended."""
    faulty = placement.faulty
    both = rf"({faulty - 1}-{faulty}|{faulty}-{faulty + 1})"
    return rf"the process( of rank {faulty} of \d ranks is|es of ranks {both} of \d ranks are) gone"


def require_one_abort(logs: object, placement: Placement) -> None:
    assert isinstance(logs, dict)
    assert {rank: note.text for rank, note in logs.items()} == dict.fromkeys(
        placement.others, repr(([("abort", 1)], "", 0))
    )
