"""The kernels of `kernels.cu`: one for each pair of dtypes and each operation, compiled when it is first needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.half import is_of_numpy
from mpidist.transport.reduction import UFUNCS

__all__ = [
    "CASTS",
    "COMBINED",
    "KERNELS",
    "KERNEL_OPTIONS",
    "LONG",
    "LONG_TABLE",
    "QUOTIENTS",
    "SHORT_TABLE",
    "combiner",
    "compile_kernel",
    "copier",
    "kernel_source",
    "longest_table",
]

# Not fused: a product and a sum that are rounded once would not be NumPy's numbers.
KERNEL_OPTIONS: Final = ("--fmad=false",)

# Dtypes as kernels.cu names them: what is read, and what is written. All dtypes of one width are copied alike.
_COPIES: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "b16"}  # by the bytes of a number
CASTS: Final = ("f4 f2", "f4 bf", "f2 f4", "bf f4")
QUOTIENTS: Final = ("f4 f4", "f8 f8", "c8 c8", "c16 c16")  # means of half precision are divided where they are joined
COMBINED: Final = ("f2", "bf", "f4", "f8")

# Arrays in a launch: with what else a kernel is told, at most the 4,096 bytes that every GPU takes as parameters, or
# the 32,764 that newer ones take. Short lists have kernels of their own, as all of a table is sent at each launch.
SHORT_TABLE: Final = 168
LONG_TABLE: Final = 1363
LONG: Final = "_long"  # the end of the names of kernels with long tables
_LONG_SINCE: Final = (12, 1)  # CUDA, of the driver and of NVRTC
_LONG_FROM: Final = 70  # compute capability

_COPIERS: Final = (
    {f"copy_{width}": (code, code, "false") for width, code in _COPIES.items()}
    | {f"cast_{pair.replace(' ', '_')}": (*pair.split(), "false") for pair in CASTS}
    | {f"divide_{pair.replace(' ', '_')}": (*pair.split(), "true") for pair in QUOTIENTS}
)
# The line after `kernels.cu` that makes the kernel.
_LINES: Final = {
    kernel + end: f"COPIER(mpidist_{kernel + end}, {size}, {', '.join(how)})"
    for end, size in (("", SHORT_TABLE), (LONG, LONG_TABLE))
    for kernel, how in _COPIERS.items()
} | {
    f"combine_{code}_{op}": f"COMBINER(mpidist_combine_{code}_{op}, {code}, {op.upper()})"
    for code in COMBINED
    for op in UFUNCS
}
KERNELS: Final = tuple(_LINES)


@cache
def copier(read: np.dtype[Any], written: np.dtype[Any], divides: bool) -> str | None:
    """Return the kernel that copies numbers, casts and divides them; `None` if no kernel does it."""
    if read == written and not divides:
        kernel = f"copy_{read.itemsize}"
    else:
        kernel = f"{'divide' if divides else 'cast'}_{_code(read)}_{_code(written)}"
    return kernel if kernel in _COPIERS else None


@cache
def combiner(dtype: np.dtype[Any], op: str) -> str | None:
    """Return the kernel that joins pieces; `None` if there is none. A complex sum is the pair of two sums."""
    of_pairs = dtype.kind == "c" and op == "sum"
    kernel = f"combine_{_code(np.dtype(f'f{dtype.itemsize // 2}') if of_pairs else dtype)}_{op}"
    return kernel if kernel in _LINES else None


def _code(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in kernels.cu, `f4` for float32; a dtype without kernels gets a name of no kernel."""
    if dtype.name == "bfloat16":
        return "bf"
    return f"{dtype.kind}{dtype.itemsize}" if is_of_numpy(dtype) else dtype.name


def compile_kernel(kernel: str) -> Any:
    """Compile a kernel, one of `KERNELS`, for the current device: in a tenth of a second if CuPy has it not on disk."""
    module = cuda.cupy().RawModule(code=kernel_source([kernel]), options=KERNEL_OPTIONS)
    return module.get_function(f"mpidist_{kernel}")


def kernel_source(kernels: Iterable[str] = KERNELS) -> str:
    """Return kernels, by default all, in CUDA C++."""
    text = (files("mpidist.transport.gpu") / "kernels.cu").read_text(encoding="utf-8")
    return "\n".join([text, *(_LINES[kernel] for kernel in kernels), ""])


def longest_table() -> int:
    """Return how many arrays a launch can take here: `LONG_TABLE` if NVRTC, the driver and all GPUs are new enough."""
    its = cuda.cupy().cuda
    driver = divmod(its.runtime.driverGetVersion() // 10, 100)
    gpus = [int(its.Device(index).compute_capability) for index in range(its.runtime.getDeviceCount())]
    are_new = min(driver, its.nvrtc.getVersion()) >= _LONG_SINCE and min(gpus) >= _LONG_FROM
    return LONG_TABLE if are_new else SHORT_TABLE
