"""Kernels and events of one GPU."""

from mpidist.transport.gpu.compiling import Compiling as Compiling
from mpidist.transport.gpu.events import Events as Events
from mpidist.transport.gpu.events import Launched as Launched
from mpidist.transport.gpu.events import has_come as has_come
from mpidist.transport.gpu.events import on_stream as on_stream
from mpidist.transport.gpu.kernels import DeviceKernels as DeviceKernels

__all__ = [
    "Compiling",
    "DeviceKernels",
    "Events",
    "Launched",
    "has_come",
    "on_stream",
]
