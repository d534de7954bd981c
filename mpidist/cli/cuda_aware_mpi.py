"""Whether MPI takes device memory: by MPI's own report, and by the proof of a child process.

An MPI that cannot take device memory reads it as host memory, and crashes: so this process never tries. The child does:

    python -m mpidist.cli.cuda_aware_mpi DEVICE

It sends arrays of device memory to itself, and prints "right" or "wrong".
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.mpi.launcher_variables import LAUNCHER_PREFIXES
from mpidist.transport.mpi.library import load_mpi

__all__ = ["Answer", "child_command", "child_environment", "hint", "prove", "takes_device_memory"]

_RIGHT: Final = "right"
_SIZES: Final = (8, 100_000, 4 << 20)  # bytes: libraries send them in different ways
PROOF_SECONDS: Final = 60.0
_TAIL: Final = 2000  # characters of what a child wrote
_OF_RANKS: Final = "_MPIDIST_"  # what a rank marks its environment with


@final
class Answer(NamedTuple):
    """Whether MPI takes device memory, and the reason for the answer."""

    works: bool
    reason: str


def hint() -> Answer:
    """Query MPI itself, in the two possible ways. A yes is no proof; no answer is a no."""
    mpi = load_mpi()
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    if query is not None and query() == 1:
        return Answer(True, "MPIX_Query_cuda_support returns yes")
    said = "it has no MPIX_Query_cuda_support" if query is None else "MPIX_Query_cuda_support returns no"
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds is not None and any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")):
        return Answer(True, f"mpi_memory_alloc_kinds is {kinds}")
    also = "it names no kinds of memory" if kinds is None else f"mpi_memory_alloc_kinds is {kinds}"
    return Answer(False, f"this MPI library is not built for CUDA: {said}, and {also}")


def child_command(device: int) -> list[str]:
    """Return the command that proves that MPI takes the memory of a device."""
    return [sys.executable, "-m", "mpidist.cli.cuda_aware_mpi", str(device)]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a program starts MPI alone."""
    kept = {name: text for name, text in environ.items() if not name.startswith((*LAUNCHER_PREFIXES, _OF_RANKS))}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def prove(command: Sequence[str], seconds: float = PROOF_SECONDS) -> Answer:
    """Start a child process that passes device memory to MPI. Its output and exit status are the answer.

    `command` prints "right" and exits with 0 if MPI can.
    """
    with tempfile.TemporaryFile() as output:  # not a pipe: it stays open while any process holds it
        try:
            child = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=child_environment(os.environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Answer(False, f"a child process could not be started: {error.strerror}")
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return Answer(False, f"a child process did not end within {seconds:g} s")
        output.seek(0)
        lines = output.read().decode(errors="replace")[-_TAIL:].strip().splitlines()
    last = lines[-1] if lines else "nothing"
    if child.returncode < 0:
        number, names = -child.returncode, {its.value: its.name for its in signal.Signals}
        return Answer(False, f"a child process was ended by {names.get(number, f'signal {number}')}")
    if child.returncode:
        return Answer(False, f"a child process failed with exit status {child.returncode}: {last}")
    if last != _RIGHT:
        return Answer(False, f"a child process got wrong numbers; its output: {last}")
    return Answer(True, "a child process sent device memory and got the right numbers")


def takes_device_memory(cupy: Any) -> bool:
    """Send arrays of the current device to this rank by MPI, and compare. MPI that cannot may crash. Local."""
    mpi = load_mpi()
    comm, view = mpi.COMM_SELF, mpi.buffer.fromaddress
    for nbytes in _SIZES:
        numbers = np.arange(nbytes).astype(np.uint8)
        sent, received = cupy.asarray(numbers), cupy.asarray(np.zeros_like(numbers))
        cupy.cuda.get_current_stream().synchronize()
        into = comm.Irecv([view(int(received.data.ptr), nbytes), mpi.BYTE], 0)
        comm.Isend([view(int(sent.data.ptr), nbytes), mpi.BYTE], 0).Wait()
        into.Wait()
        if not np.array_equal(cupy.asnumpy(received), numbers):
            return False
    return True


if __name__ == "__main__":
    cupy = cuda.cupy()
    cupy.cuda.Device(int(sys.argv[1])).use()
    print(_RIGHT if takes_device_memory(cupy) else "wrong", flush=True)
