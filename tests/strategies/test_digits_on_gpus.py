"""The example learns on a GPU, which the ranks share, what it learns on the CPU."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from host_cuda import are_emulated
from host_cuda.gpus import gpus

__all__ = ["gpus"]  # fixtures

EXAMPLE = str(Path(__file__).parents[2] / "docs" / "examples" / "digits.py")
MOST_DIFFERENCE = 0.011  # of 360 digits: 4. Sums in another order round otherwise


def share_learnt(device, comm, monkeypatch, capsys):
    """Run the example on a device. Returns which share of the held-out digits all ranks together have learnt."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--device", device, "--epochs", "12"])
    runpy.run_path(EXAMPLE, run_name="__main__")
    found = re.search(r"([\d.]+)% of \d+ held-out", comm.bcast(capsys.readouterr().out))  # the first rank says it
    assert found is not None
    return float(found[1]) / 100


@pytest.mark.ranks(1, 4)
def test_digits_on_the_cpu_reach_accuracy(monkeypatch, capsys, comm):
    assert share_learnt("cpu", comm, monkeypatch, capsys) > 0.5


@pytest.mark.ranks(1, 4)
@pytest.mark.usefixtures("gpus")
def test_digits_on_a_gpu_reach_the_accuracy_of_the_cpu(monkeypatch, capsys, comm):
    if are_emulated():
        pytest.skip("needs a real GPU: emulated ones multiply no matrices")
    on_gpu, on_cpu = (share_learnt(device, comm, monkeypatch, capsys) for device in ("gpu", "cpu"))
    assert abs(on_gpu - on_cpu) <= MOST_DIFFERENCE
