"""CUDA emulated on the host, for the real CuPy, in a virtual environment that build.py has been run in."""

from __future__ import annotations

import ctypes
import os

__all__ = ["are_emulated", "problems"]


def are_emulated() -> bool:
    """Tell whether this process has GPUs that are not there."""
    return "HOST_CUDA" in os.environ


def problems() -> str:
    """Say what real GPUs would not have forgiven since the last call, a line each."""
    if not are_emulated():
        return ""
    told = ctypes.CDLL("libcuda.so.1").host_cuda_problems  # the one that is loaded
    told.restype = ctypes.c_char_p
    return str(told().decode())
