"""The formulas of all-reduces that mpidist lacks, which benchmarks print beside those of mpidist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mpidist
from mpidist.transport.costs.cost_model import CostModel

sys.path.append(str(Path(mpidist.__file__).parents[1] / "benchmarks"))

from formulas import predict

pytestmark = pytest.mark.no_mpi


def test_slow_links_set_the_pace_of_algorithms_that_mpidist_lacks() -> None:
    model, nbytes = CostModel(link_bytes_per_second=25e6), 64 << 20
    least = 2 * nbytes * 0.5 / 25e6  # the bytes that must cross the link
    assert predict("two_shot", model, nbytes, (2, 2)) == model.seconds("two_shot", nbytes, (2, 2))
    assert predict("ring", model, nbytes, (2, 2)) == pytest.approx(1.5 * least, rel=0.1)
    assert predict("recursive_doubling", model, nbytes, (2, 2)) == pytest.approx(2 * least, rel=0.1)
    assert predict("mpi", model, nbytes, (2, 2)) <= predict("recursive_doubling", model, nbytes, (2, 2))
