"""Ranks that are lost while GPUs wait for them, and how a process ends whose NCCL has not: on emulated GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_cuda.gpus import only_emulated
from jobs.faults import THREE, TWO, job, of_others, on

from mpidist.transport.failures import job_abort

__all__ = ["job", "only_emulated"]

pytestmark = [pytest.mark.no_mpi, pytest.mark.gpu, pytest.mark.usefixtures("only_emulated")]

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
    os.kill(os.getpid(), signal.{death})
    time.sleep(600)  # this thread goes on until the signal has come, which may be a little later

assert (cupy.asnumpy(start().wait()) == size).all()
if is_faulty:
    DeviceQueue.launch = die
handles = [start(), start()]
attempt("error", handles[0].wait)
attempt("after", handles[1].wait)
nccl_handles.wait_for_endings()
await_notes("error", *others)  # so that the faulty rank alone is missing where an error says who is
note("log", text=repr((emulated.ended(), problems(), nccl_handles.num_open())))
await_notes("log", *others)  # the launcher may end the others when one has ended
os._exit({code})
"""


@on(TWO, THREE)
@pytest.mark.parametrize("death", ["SIGKILL", "SIGSTOP"])
def test_rank_killed_or_stopped_before_its_launch_is_named(job, placement, death):
    """Those of its node see that it is gone, and at the deadline that it is stopped: their GPUs have begun."""
    is_dead, faulty = death == "SIGKILL", rf"rank {placement.faulty} of {placement.size} ranks is"
    options, code = "None" if is_dead else "DEADLINE", job_abort.EXIT_CODE_AFTER_FAILURE
    program = DIES_BEFORE_ITS_LAUNCH.format(death=death, options=options, code=code)
    ended = job(program, placement, is_blind=is_dead, TESTS=str(Path(__file__).parents[2]))
    for error in of_others(ended, "error", placement):
        assert error.kind == "PeerFailedError" or (error.kind == "DeadlineExceededError" and not is_dead), error
        assert re.search(rf"the process of {faulty} gone" if is_dead else rf"{faulty} stopped", error.text), error
    assert all("earlier call failed" in after.text for after in of_others(ended, "after", placement))
    logs = [log.text for log in of_others(ended, "log", placement)]
    assert logs == [repr(([("abort", 1)], "", 0))] * len(placement.others)


BEGIN = """
import atexit, threading
atexit.register(lambda: print([its.name for its in threading.enumerate() if its.name.startswith("mpidist")]))
from host_cuda.emulated import HANGS, Emulated
from mpidist.transport import cuda
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.nccl import handles
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.reduction import Reduction

cupy, emulated = cuda.cupy(), Emulated()
cupy.cuda.set_allocator(None)  # memory is given back at once, for which CUDA waits until all work is done
(handle,) = handles.start_init(1, None, {0: 0}).wait()
queue = DeviceQueue()
its = NcclCommunicator(handle, "alone", 0, 1, queue, DeviceKernels())
value = cupy.ones(1000)
reduce = lambda: its.all_reduce(value, Reduction())
queue.wait(queue.launch("a call", reduce, value))
emulated.wish("destroyed alone", HANGS)
"""
UNDER_WAY = "emulated.hold(); queue.launch('a call', reduce, value); del value"
ABORTING = """
emulated.wish("abort", HANGS)
handles.abort_all("of a test")
later = threading.Timer(1.0, emulated.be_normal)
later.daemon = True
later.start()
"""
HANGING = """
emulated.wish("abort", HANGS)
handles.LIMIT_SECONDS = 1.0
handles.abort_all("of a test")
"""


@pytest.mark.parametrize(
    ("program", "left"),
    [("", []), (UNDER_WAY, []), (ABORTING, []), (HANGING, ["mpidist the abort of communicators"])],
    ids=["nothing is under way", "a call is under way", "an abort ends late", "an abort hangs"],
)
def test_exit_of_a_process_destroys_no_communicator(program, left):
    """For which NCCL might wait without end. What aborts them is waited for, for a while."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BEGIN + program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{left}\n"), done.stderr
