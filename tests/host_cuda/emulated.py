"""What tests see of the emulated CUDA, and what they let go wrong there."""

import _thread
import ctypes
import threading
import time
from contextlib import contextmanager
from functools import cache
from typing import final

from host_cuda import are_emulated
from mpidist.transport import cuda

__all__ = ["HANGS", "UNDER_WAY", "Emulated", "memory_is_given_back_late", "problems"]

HANGS = -1
UNDER_WAY = "launches of NCCL under way"
_SETTLE_SECONDS = 60.0


@cache
def _library():
    library = ctypes.CDLL("libcuda.so.1")  # the one that is loaded
    library.host_cuda_problems.restype = library.host_cuda_calls.restype = ctypes.c_char_p
    library.host_cuda_count.restype = ctypes.c_long
    library.host_cuda_wish.argtypes = [ctypes.c_char_p, ctypes.c_long]
    library.host_cuda_settle.argtypes = [ctypes.c_double]
    library.host_cuda_freed.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def problems():
    """Say what real GPUs would not have forgiven since the last call, a line each, when they have done their work."""
    if not are_emulated():
        return ""
    _library().host_cuda_settle(_SETTLE_SECONDS)
    return str(_library().host_cuda_problems().decode())


@final
class Emulated:
    """The emulated GPUs of this process, and its NCCL.

    A wish has the name of what it changes: a call, which then fails with this status, or with `HANGS` does not return;
    or "NCCL is held back", "NCCL's delay" in microseconds, "NCCL's version", "an error of NCCL" that is found later; or
    "the driver's version" and "NVRTC's version", of which 12010 is CUDA 12.1; or "the compute capability", which CuPy
    asks once, and of which 70 is Volta's.
    """

    def __init__(self):
        self._calls: list[tuple[str, int]] = []
        self._wishes: set[str] = set()
        self.forget()
        self.wish("calls are noted")

    def wish(self, name, number=1):
        """Let something be so from now on; with 0, no longer."""
        self._wishes.add(name)
        _library().host_cuda_wish(name.encode(), number)

    def hold(self, is_held=True):
        """Keep the calls of NCCL that are launched from being done."""
        self.wish("NCCL is held back", is_held)

    def calls(self, *names):
        """Return the calls of these names since the last `forget`, with the number of their bytes or communicators.

        Copies are called "copy up", "copy down" and "copy". "abort" and "destroy" end communicators, of a group
        together. "a stream of its own" has its priority.
        """
        for line in _library().host_cuda_calls().decode().splitlines():
            name, _, number = line.rpartition(" ")
            self._calls.append((name, int(number)))
        return [its for its in self._calls if its[0] in names]

    def nbytes(self, name):
        return sum(number for _, number in self.calls(name))

    def forget(self):
        self.calls()
        self._calls.clear()

    def ended(self):
        """Return how communicators were ended: `("abort", 2)` for two together."""
        return self.calls("abort", "destroy")

    def interrupt_in(self, name):
        """Interrupt the main thread when it waits for the next call of this name."""

        def interrupt():
            while not self.calls(name):
                time.sleep(0.01)
            time.sleep(0.2)  # in which it comes to its wait
            _thread.interrupt_main()

        self.forget()
        threading.Thread(target=interrupt).start()

    def wait_for_end(self):
        while not self.ended():
            time.sleep(0.01)

    def count(self, what):
        """Count the "streams", "events", "kernels" that were run, or launches `UNDER_WAY`."""
        return int(_library().host_cuda_count(what.encode()))

    def comes_to(self, what, number, meanwhile=lambda: time.sleep(0.01)):
        """Wait until a `count` is as high as that; say whether it is no higher."""
        while self.count(what) < number:
            meanwhile()
        return self.count(what) == number

    def be_normal(self):
        """Take all wishes back, and let go on what hangs, of which each call is still noted."""
        for name in self._wishes - {"calls are noted"}:
            self.wish(name, 0)


@contextmanager
def memory_is_given_back_late():
    """Let memory that CuPy frees be rubbish when its stream comes there, as if somebody else had it at once."""
    if not are_emulated():
        yield
        return
    memory_hook, streams = cuda.current().cupy.cuda.memory_hook, {}
    current = cuda.current().cupy.cuda.get_current_stream

    class Rubbish(memory_hook.MemoryHook):
        name = "rubbish"

        # By address, which CuPy keeps for one stream: objects have the ids of others that another thread has freed, and
        # hooks are those of a thread.
        def malloc_postprocess(self, *, mem_ptr, **_):
            streams[mem_ptr] = current().ptr

        def free_preprocess(self, *, mem_ptr, mem_size, **_):
            if mem_ptr in streams:
                _library().host_cuda_freed(mem_ptr, mem_size, streams.pop(mem_ptr))

    with Rubbish():
        yield
