"""The kernels of `kernels.cu`, each compiled when it is first needed: NVRTC takes seconds for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

from mpidist.transport.cuda import Cuda

__all__ = [
    "COMBINED",
    "KERNELS",
    "KERNEL_OPTIONS",
    "LONG",
    "LONG_TABLE",
    "SHORT_TABLE",
    "compile_kernel",
    "kernel_source",
    "longest_table",
]

# Not fused: a product and a sum that are rounded once would not be NumPy's numbers.
KERNEL_OPTIONS: Final = ("--fmad=false",)
COMBINED: Final = ("f4 f4", "f8 f8", "f2 f2", "f2 f4", "f4 f2", "bf bf", "bf f4", "f4 bf")  # parts and their sum

# Arrays in a launch: with what else a kernel is told, at most the 4,096 bytes that every GPU takes as parameters, or
# the 32,764 that newer ones take. Short lists have kernels of their own, as all of a table is sent at each launch.
SHORT_TABLE: Final = 168
LONG_TABLE: Final = 1363
LONG: Final = "_long"  # the end of the names of kernels with long tables
_LONG_SINCE: Final = (12, 1)  # CUDA, of the driver and of NVRTC
_LONG_FROM: Final = 70  # compute capability

# The line after `kernels.cu` that makes the kernel.
_COPIERS: Final = {
    "copy": "COPIES(AS_IT_IS)",
    "cast": "COPIES(AS_IT_IS) CASTS(AS_IT_IS)",
    "divide_f4": "DIVIDED(32, f4, f4)",  # the most common one, which all others delay
    "divide": "QUOTIENTS(DIVIDED)",
}
_LINES: Final = {
    kernel + end: f"COPIER(mpidist_{kernel + end}, {size}, {cases})"
    for end, size in (("", SHORT_TABLE), (LONG, LONG_TABLE))
    for kernel, cases in _COPIERS.items()
} | {
    f"combine_{'_'.join(pair)}": f"COMBINE({'_'.join(pair)}, {', '.join(pair)})"
    for pair in (text.split() for text in COMBINED)
}
KERNELS: Final = tuple(_LINES)


def compile_kernel(cuda: Cuda, kernel: str) -> Any:
    """Compile a kernel, one of `KERNELS`, for the current device: in tenths of a second, unless CuPy has it on disk."""
    module = cuda.cupy.RawModule(code=kernel_source([kernel]), options=KERNEL_OPTIONS)
    return module.get_function(f"mpidist_{kernel}")


def kernel_source(kernels: Iterable[str] = KERNELS) -> str:
    """Return kernels, by default all, in CUDA C++."""
    text = (files("mpidist.transport.gpu") / "kernels.cu").read_text(encoding="utf-8")
    return "\n".join([text, *(_LINES[kernel] for kernel in kernels), ""])


def longest_table(cuda: Cuda) -> int:
    """Return how many arrays a launch can take here: `LONG_TABLE` if NVRTC, the driver and all GPUs are new enough."""
    its = cuda.cupy.cuda
    driver = divmod(its.runtime.driverGetVersion() // 10, 100)
    gpus = [int(its.Device(index).compute_capability) for index in range(its.runtime.getDeviceCount())]
    are_new = min(driver, its.nvrtc.getVersion()) >= _LONG_SINCE and min(gpus) >= _LONG_FROM
    return LONG_TABLE if are_new else SHORT_TABLE
