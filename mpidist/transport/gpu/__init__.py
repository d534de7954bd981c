"""Kernels and events of one GPU."""

from mpidist.transport.gpu.array_lists import address_of
from mpidist.transport.gpu.background import Background
from mpidist.transport.gpu.copy_table import PackLayout
from mpidist.transport.gpu.events import Launched, is_complete, new_event, new_stream, on_stream, record_event
from mpidist.transport.gpu.kernels import DeviceCopy, DeviceKernels, kernels_needed
from mpidist.transport.gpu.new_arrays import NewArrays
from mpidist.transport.gpu.rows import change_rows_of_gpu

__all__ = [
    "Background",
    "DeviceCopy",
    "DeviceKernels",
    "change_rows_of_gpu",
    "Launched",
    "NewArrays",
    "kernels_needed",
    "PackLayout",
    "address_of",
    "is_complete",
    "new_event",
    "new_stream",
    "on_stream",
    "record_event",
]
