"""The compilation of a GPU's kernels, in the background: it takes seconds, on some ranks only."""

from __future__ import annotations

import threading
from typing import final

from mpidist.transport.cuda import Cuda
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.text import first_line

__all__ = ["Compiling"]


@final
class Compiling:
    """Compiles kernels in a daemon thread, so that ranks which have them can see that the others are at it.

    Args:
        cuda: What this process has of CuPy.
        kernels: The kernels.
    """

    def __init__(self, cuda: Cuda, kernels: DeviceKernels) -> None:
        self._cuda = cuda
        self._kernels = kernels
        self._device = int(cuda.cupy.cuda.runtime.getDevice())
        self._outcome = False, ""
        threading.Thread(target=self._run, name="mpidist kernels", daemon=True).start()

    def outcome(self) -> tuple[bool, str]:
        """Say whether it is over, and what went wrong. Local."""
        return self._outcome

    def cancel(self) -> None:
        """Leave it alone."""

    def _run(self) -> None:
        try:
            self._cuda.cupy.cuda.Device(self._device).use()  # a thread begins with the first one
            self._kernels.compile()
        except Exception as problem:
            self._outcome = True, first_line(problem) or type(problem).__name__
        else:
            self._outcome = True, ""
