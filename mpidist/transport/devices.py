"""Devices on which ranks compute."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, final

from mpidist.errors import UnavailableError
from mpidist.transport import arrays, cuda
from mpidist.transport.topology import Topology

__all__ = ["Device", "are_several_gpus", "choose_device", "on_device", "wait_for_devices"]

logger = logging.getLogger("mpidist.transport")

# GPU:1  /gpu:0  /cpu:0  /device:GPU:1  /rank:3/GPU:0
_PATTERN: Final = re.compile(r"(?:/rank:\d+)?/?(?:device:)?(cpu|gpu)(?::(\d+))?", re.IGNORECASE)


@final
@dataclass(frozen=True)
class Device:
    """A CPU or a GPU of this rank's node."""

    kind: str  # `"cpu"` or `"gpu"`
    index: int = 0  # among the devices of its kind that the process may use
    is_named: bool = field(default=False, compare=False)  # by the user; else a strategy chose it

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read a device string: `"GPU:1"`, `"/gpu:0"`, `"/cpu:0"`."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise ValueError(f'a device is a string such as "/cpu:0" or "/gpu:1", got {text!r}')
        return cls(match[1].lower(), int(match[2] or 0), is_named=True)

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.kind == "gpu"

    def use(self) -> None:
        """Make this the current device, if it is a GPU.

        Raises:
            UnavailableError: If this process sees no such GPU.
        """
        if not self.is_gpu:
            return
        visible = arrays.num_visible_gpus()
        if self.index >= visible:
            reason = cuda.current().support.reason
            sees = f"this process sees {visible} GPUs{f': {reason}' if reason else ''}"
            raise UnavailableError(f"{self} was requested, and {sees}; look at CUDA_VISIBLE_DEVICES")
        arrays.use_gpu(self.index)

    def __str__(self) -> str:
        return f"/{self.kind}:{self.index}"


def choose_device(topology: Topology) -> Device:
    """Choose this rank's device: the GPU of its local rank, or the CPU where CuPy sees no GPU.

    A launcher shows every rank all GPUs of the node, or each rank its own GPU alone, which then has number 0.
    """
    visible = arrays.num_visible_gpus()
    if visible == 0:
        return Device("cpu")
    if 1 < visible < topology.local_size and topology.is_leader:
        logger.warning(
            "r%d | %d ranks share %d GPUs on %s", topology.rank, topology.local_size, visible,
            topology.hostnames[topology.rank],
        )  # fmt: skip
    return Device("gpu", topology.local_rank % visible)


def are_several_gpus(devices: Sequence[Device]) -> bool:
    """Whether devices differ, and some are GPUs, so that a device has to be made current before it is used."""
    return any(device != devices[0] for device in devices) and any(device.is_gpu for device in devices)


def wait_for_devices(devices: Sequence[Device]) -> None:
    """Wait for the current streams of all devices but the first, so that the first one can read their arrays."""
    for at in range(1, len(devices)):
        with on_device(devices, at):
            pass  # `on_device` waits at its end


@contextmanager
def on_device(devices: Sequence[Device], at: int) -> Iterator[None]:
    """Make one of several devices current for the body, and the first one again after it. No effect on a single device.

    The body begins when the work on the first device is done, and ends when the work on its own device is done.
    """
    if at == 0 or not are_several_gpus(devices):
        yield
        return
    arrays.wait_for_stream()
    devices[at].use()
    try:
        yield
        arrays.wait_for_stream()
    finally:
        devices[0].use()
