"""The measurements of the GPU check, small: each answers, and times nothing that is wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from host_cuda.gpus import emulated, gpus, only_emulated

from mpidist.transport import cuda

__all__ = ["emulated", "gpus", "only_emulated"]  # fixtures

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu.bench import Bench
from gpu.report import Report, read_rows

if TYPE_CHECKING:
    pass


def measured(gpus, ask, path=None, comm=None):
    """Run a part's measurements."""
    report = Report(path, judges=False)
    module, _, function = ask.partition(":")
    getattr(importlib.import_module(f"gpu.{module}"), function)(Bench(True, comm), report)
    gpus.cupy.cuda.set_allocator(gpus.cupy.get_default_memory_pool().malloc)  # which some do without
    return report


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize(
    ("ask", "answers"),
    [("kernels:machine", 2), ("kernels:measure", 17), ("calls:public_call", 4)],
)
def test_measurement_of_one_rank(gpus, tmp_path, capfd, ask, answers):
    report = measured(gpus, ask, tmp_path / "part.jsonl")
    others = [row for row in report.rows if "torch" not in row.question]
    assert len(others) == answers, [row.question for row in others]
    assert read_rows(tmp_path / "part.jsonl") == report.rows
    said = capfd.readouterr().out
    assert all(row.got in said for row in report.rows)
    assert not any(row.got == "not measured" for row in others), [row.note for row in report.rows]


@pytest.mark.ranks(max=1)
def test_public_calls_that_are_timed_write_their_results(emulated, monkeypatch):
    """In place one rank has nothing to write: the row of that says nothing of others."""
    launches = {}

    def count(bench, ways, turns, clock):
        for name, call in ways.items():
            call()
            emulated.forget()
            call()
            launches[name] = len(emulated.calls("a kernel"))
        return dict.fromkeys(ways, np.zeros(1))

    monkeypatch.setattr(Bench, "times", count)
    measured(cuda.current(), "calls:public_call")
    assert launches == {"new results": 1, "out= given": 1, "in place": 0, "started, and waited for": 1}


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(
    ("ask", "answers"), [("calls:peers", 3), ("calls:staging", 2), ("calls:overlap", 1), ("calls:faults", 2)]
)
def test_measurement_of_two_ranks(only_emulated, gpus, comm, monkeypatch, ask, answers):
    """On real GPUs the check itself asks: there NCCL of two ranks on a GPU wants settings from its start."""
    for name in ("MPIDIST_NCCL", "MPIDIST_PRETEND_NODES", "MPIDIST_STAGING_BYTES", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")  # and back, after the measurement has set it
        monkeypatch.delenv(name)
    report = measured(gpus, ask, comm=comm)
    assert len([row for row in report.rows if "torch" not in row.question]) == answers
    assert [row.note for row in report.rows if row.got == "not measured"] == []
    if ask == "calls:faults":
        (reset,) = (row for row in report.rows if row.question.startswith("reset()"))
        assert reset.verdict == "at most 10 s: open"


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("what", ["one byte", "too late"])
def test_wrong_results_are_not_timed(gpus, monkeypatch, what):
    from gpu import kernels

    class Wrong(kernels.DeviceKernels):
        def pack(self, sources, buffer, layout):
            super().pack(sources, buffer, layout=layout)
            if what == "one byte":
                buffer.view(np.uint8)[7:8] = 1
            if what == "too late":
                buffer[-1:] = buffer[:1]

    monkeypatch.setattr(kernels, "DeviceKernels", Wrong)
    report = measured(gpus, "kernels:measure")
    packed = [
        row for row in report.rows if not row.question.startswith(("sum of", "add")) and "torch" not in row.question
    ]
    assert len(packed) == 5
    assert all(row.got == "not measured" and "numbers are wrong" in row.note for row in packed), packed
