"""How a process ends whose NCCL has not: in processes of their own, with emulated GPUs."""

import os
import subprocess
import sys

import pytest
from host_cuda import are_emulated

pytestmark = [pytest.mark.no_mpi, pytest.mark.gpu]

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
def test_a_process_ends_and_destroys_no_communicator(program: str, left: list[str]) -> None:
    """For which NCCL might wait without end. What aborts them is waited for, for a while."""
    if not are_emulated():
        pytest.skip("needs a GPU that is emulated")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BEGIN + program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{left}\n"), done.stderr
