"""The kernels of `kernels.cu`, each compiled when it is first needed: NVRTC takes seconds for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

from mpidist.transport.cuda import Cuda

__all__ = ["COMBINED", "KERNELS", "KERNEL_OPTIONS", "compile_kernel", "kernel_source"]

# Not fused: a product and a sum that are rounded once would not be NumPy's numbers.
KERNEL_OPTIONS: Final = ("--fmad=false",)
COMBINED: Final = ("f4 f4", "f8 f8", "f2 f2", "f2 f4", "f4 f2", "bf bf", "bf f4", "f4 bf")  # parts and their sum

# The line after `kernels.cu` that makes the kernel.
_LINES: Final = {
    "copy": "COPIER(mpidist_copy, COPIES(AS_IT_IS))",
    "cast": "COPIER(mpidist_cast, COPIES(AS_IT_IS) CASTS(AS_IT_IS))",
    "divide_f4": "COPIER(mpidist_divide_f4, DIVIDED(32, f4, f4))",  # the most common one, which all others delay
    "divide": "COPIER(mpidist_divide, QUOTIENTS(DIVIDED))",
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
