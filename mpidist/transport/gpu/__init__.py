"""Kernels and events of one GPU."""

from mpidist.transport.gpu.compiling import Compiling
from mpidist.transport.gpu.events import Events, Launched, has_come, on_stream
from mpidist.transport.gpu.kernels import DeviceKernels

__all__ = [
    "Compiling",
    "DeviceKernels",
    "Events",
    "Launched",
    "has_come",
    "on_stream",
]
