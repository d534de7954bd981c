"""Device strings, and which GPU a rank takes."""

import importlib.util

import pytest

from mpidist.errors import UnavailableError
from mpidist.transport import arrays
from mpidist.transport.devices import Device, choose_device
from mpidist.transport.topology import Topology

pytestmark = pytest.mark.no_mpi


DEVICES = {
    "cpu": ("cpu", 0),
    "CPU:3": ("cpu", 3),
    "/gpu:12": ("gpu", 12),
    "/device:GPU:1": ("gpu", 1),
    "device:cpu:0": ("cpu", 0),
    "/rank:3/GPU:2": ("gpu", 2),
}


def test_device_strings_are_read():
    for text, (kind, index) in DEVICES.items():
        device = Device.parse(text)
        assert (device.kind, device.index) == (kind, index)
        assert device.is_gpu == (kind == "gpu")
        assert Device.parse(str(device)) == device
        assert device.is_named
        assert device == Device(kind, index), "which a strategy found"
        assert not Device(kind, index).is_named


def test_other_strings_are_refused():
    wrong = ["", "/", "tpu:0", "gpu:", "gpu:-1", "gpu:x", "gpu 0", "gpu:0 ", "/rank:1", "/rank:/gpu:0"]
    for one in (*wrong, 0, None, b"cpu"):
        with pytest.raises(ValueError, match="a device is a string such as") as caught:
            Device.parse(one)
        assert repr(one) in str(caught.value)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (4, [0, 1, 2, 3]),  # every rank sees all GPUs of the node
        (1, [0, 0, 0, 0]),  # CUDA_VISIBLE_DEVICES shows each rank its own
        (8, [0, 1, 2, 3]),
        (2, [0, 1, 0, 1]),  # more ranks than GPUs share them, with a warning
        (3, [0, 1, 2, 0]),
    ],
)
def test_ranks_of_a_node_take_gpus_in_turn(visible, indices, monkeypatch, caplog):
    monkeypatch.setattr(arrays, "num_visible_gpus", lambda: visible)
    ranks = [Topology(rank, (0,) * 4, ("here",) * 4) for rank in range(4)]
    assert [choose_device(rank) for rank in ranks] == [Device("gpu", index) for index in indices]
    assert caplog.text.count("4 ranks share") == (1 < visible < 4)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_gpus_without_cupy_are_none_and_refused():
    assert arrays.num_visible_gpus() == 0
    assert choose_device(Topology(0, (0,), ("here",))) == Device("cpu")
    with pytest.raises(UnavailableError, match=r"/gpu:1 was requested, and this process sees 0 GPUs.*cuda13"):
        Device("gpu", 1).use()
    Device("cpu").use()
