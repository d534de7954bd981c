"""CuPy, GPUs and NCCL of this process, with the reasons for missing parts.

CuPy is imported here alone, and only at its first use. No device is touched before CuPy reports that there is
one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

from mpidist.transport.text import first_line

__all__ = ["INSTALL_CUPY", "LEAST_NCCL", "Cuda", "GpuSupport", "cupy", "current", "nccl", "nccl_version_text"]

LEAST_NCCL: Final = 22203  # 2.22.3: the oldest that aborts all communicators of a device together, as a group
_LEAST_CUPY: Final = 14

INSTALL_CUPY: Final = "`pip install 'cupy-cuda13x[ctk]' nvidia-nccl-cu13` brings it (drivers of CUDA 12: 12 for 13)"


@final
@dataclass(frozen=True)
class GpuSupport:
    """Versions and numbers of CuPy, GPUs and NCCL. A missing part has version 0, or an empty one."""

    cupy_version: str = ""
    num_devices: int = 0  # GPUs that this process may use
    nccl_version: int = 0  # 22809 is 2.28.9
    runtime_version: int = 0  # of CUDA, with which CuPy was built: 12090 is 12.9
    driver_version: int = 0  # the newest CUDA that the driver supports
    reason: str = ""  # why NCCL cannot be used, and what to do about it; empty if it can


@final
class Cuda:
    """CuPy and its binding of NCCL, loaded at their first use."""

    @cached_property
    def cupy(self) -> Any:
        """The module `cupy`."""
        with _no_warnings():
            import cupy  # guarded: `import mpidist` must not start CUDA

        return cupy

    @property
    def is_loaded(self) -> bool:
        """Whether CuPy was loaded here."""
        return "cupy" in vars(self)

    @cached_property
    def nccl(self) -> Any:
        """The module `cupy.cuda.nccl`."""
        with _no_warnings():
            from cupy.cuda import nccl  # guarded, as above

        return nccl

    @cached_property
    def support(self) -> GpuSupport:
        """GPU support, detected once. The first step that fails gives the reason, and the remedy."""
        try:
            cupy = self.cupy
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
                return GpuSupport(reason=f"CuPy is not installed; {INSTALL_CUPY}")
            return GpuSupport(reason=f"CuPy cannot be imported: {first_line(error)}")
        version, runtime = str(cupy.__version__), cupy.cuda.runtime
        if int(version.partition(".")[0]) < _LEAST_CUPY:
            return GpuSupport(version, reason=f"CuPy {version} is too old; version {_LEAST_CUPY} or later is needed")
        built, driver = int(runtime.runtimeGetVersion()), int(runtime.driverGetVersion())
        if not cupy.cuda.is_available():
            return GpuSupport(version, 0, 0, built, driver, f"CuPy finds no GPU: {_why_no_device(runtime)}")
        count = int(runtime.getDeviceCount())
        number, reason = self._find_nccl(built)
        return GpuSupport(version, count, number, built, driver, reason)

    def _find_nccl(self, built: int) -> tuple[int, str]:
        install = f"`pip install nvidia-nccl-cu{built // 1000}` brings it"
        try:
            nccl = self.nccl
        except ImportError as error:
            return 0, f"CuPy's binding of NCCL cannot be imported: {first_line(error)}"
        if not nccl.available:
            return 0, f"NCCL's library, libnccl.so.2, is not found; {install}"
        number = int(nccl.get_version())
        if number < LEAST_NCCL:
            least = nccl_version_text(LEAST_NCCL)
            return number, f"NCCL {nccl_version_text(number)} is older than {least}; {install}"
        return number, ""


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress warnings of missing parts, of which `support` gives the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def nccl_version_text(number: int) -> str:
    """Write NCCL's version as people do: 22809 as `2.28.9`."""
    if not number:
        return "none"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _why_no_device(runtime: Any) -> str:
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        return f"{first_line(error)}. See whether `nvidia-smi` works"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all but {count}"
    return f"the driver shows {count}. See the list of `nvidia-smi`"


_CURRENT: Final = Cuda()


def current() -> Cuda:
    """Return the object of this process."""
    return _CURRENT


def cupy() -> Any:
    """Return the module `cupy`: only where a value or the user needs device memory, as CuPy is imported then."""
    return _CURRENT.cupy


def nccl() -> Any:
    """Return the module `cupy.cuda.nccl`, which is imported then."""
    return _CURRENT.nccl
