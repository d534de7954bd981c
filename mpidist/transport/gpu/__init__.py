"""Kernels and events of one GPU."""

from mpidist.transport.gpu.background import Background
from mpidist.transport.gpu.events import Events, Launched, is_complete, on_stream
from mpidist.transport.gpu.kernels import DeviceKernels

__all__ = [
    "Background",
    "DeviceKernels",
    "Events",
    "Launched",
    "is_complete",
    "on_stream",
]
