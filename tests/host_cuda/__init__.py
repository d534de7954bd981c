"""CUDA emulated on the host, for the real CuPy, in a virtual environment that build.py has been run in."""

import os

__all__ = ["are_emulated"]


def are_emulated():
    """Tell whether this process has GPUs that are not there."""
    return "HOST_CUDA" in os.environ
