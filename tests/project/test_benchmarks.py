"""The benchmark beside other libraries: it runs, it notices wrong sums, and it leaves out what it cannot measure."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_session import clean_environment
from mpi_session.launch import Launcher

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from contest import targets, work  # noqa: E402
from contest.environments import MEMORY, PEERS  # noqa: E402
from contest.group import Group, GroupError  # noqa: E402
from contest.measuring import Timing  # noqa: E402
from contest.meeting import Meeting  # noqa: E402
from contest.roofline import traffic_bytes  # noqa: E402
from contest.way import runs  # noqa: E402

pytestmark = pytest.mark.no_mpi


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, str]], Path]:
    """Run it with the library of this environment, and with one that is not there."""
    folder = tmp_path_factory.mktemp("results")
    nowhere = folder / "python"
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--quick", "--peers", "mpich,gloo", "--out", str(folder)]
    command += ["--env", f"mpich={sys.executable}", "--env", f"gloo={nowhere}"]
    done = subprocess.run(
        command, env=clean_environment(), cwd=folder, capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "peers-2-ranks.csv").open(newline="") as file:
        return done.stdout, list(csv.DictReader(file)), folder


def test_quick_run_has_a_row_for_each_work_and_way(quick: Any) -> None:
    found = {(row["work"], row["way"]) for row in quick[1]}
    ways = {"raw", "raw in place", "mpidist", "mpidist in place", "mpidist per node", "mpidist symmetric"}
    assert {(name, way) for name in ("4", "64K", "1M", "tiny1000") for way in ways} <= found


def test_quick_run_records_medians_within_their_spread(quick: Any) -> None:
    for row in quick[1]:
        assert 0 < float(row["us_low"]) <= float(row["us"]) <= float(row["us_high"])
        assert len(row["us_rounds"].split()) == int(row["rounds"])


def test_quick_run_prints_what_is_asked_and_got(quick: Any) -> None:
    assert "asked and got" in quick[0]
    assert "1M: mpidist (mpich) / raw (mpich)" in quick[0]


def test_library_that_is_missing_is_named_and_skipped(quick: Any) -> None:
    assert "gloo: not installed: no environment" in quick[0]


def test_record_names_no_machine_and_no_path(quick: Any) -> None:
    text = (quick[2] / "peers-2-ranks.csv").read_text()
    assert os.uname().nodename not in text
    assert str(BENCHMARKS.parent) not in text


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ranks_are_asleep_between_turns() -> None:
    group = Group(MEMORY, Path(sys.executable), 2)
    try:
        group.join()
        states = [_state(pid) for pid in group.pids]
        group.ask("prepare", kind="size", name="4", shapes=[[1]], calls=1)
        assert states == [_state(pid) for pid in group.pids] == ["T", "T"]
    finally:
        group.end()


def test_group_that_fails_says_why_and_ends() -> None:
    group = Group(MEMORY, Path(sys.executable), 2)
    try:
        group.join()
        with pytest.raises(GroupError, match="KeyError: 'nonsense'"):
            group.ask("first", way="nonsense")
    finally:
        group.end()
    assert not [pid for pid in group.pids if Path(f"/proc/{pid}").exists()]


def _state(pid: int) -> str:
    for _ in range(1000):  # a signal is on its way for a moment
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
    return state


def test_wrong_sum_in_the_middle_of_an_array_is_noticed() -> None:
    arrays = [np.empty((700, 3), np.float32)]
    work.write_pattern(arrays, 1)
    total = [2 * arrays[0] - 1]  # ranks 0 and 1
    work.check_pattern(total, [(700, 3)], 2)
    total[0][350, 1] += 1
    with pytest.raises(ArithmeticError):
        work.check_pattern(total, [(700, 3)], 2)


@pytest.mark.parametrize("sums", [[[5.0, 4.0]], [[5.0, 5.0, 5.0]], []])
def test_wrong_ends_and_shapes_are_noticed(sums: list[list[float]]) -> None:
    work.check_ends([np.array([5.0, 5.0])], [(2,)], 2, 2)
    with pytest.raises(ArithmeticError):
        work.check_ends([np.array(one) for one in sums], [(2,)], 2, 2)


def test_buckets_hold_at_most_their_bytes_and_keep_the_order() -> None:
    sizes = [3, 4, 11, 1, 9, 1]
    assert [sizes[group] for group in runs(sizes, 10)] == [[3, 4], [11], [1, 9], [1]]


def test_barrier_ends_when_a_rank_does_not_come(tmp_path: Path) -> None:
    Meeting(tmp_path / "alone", 0, 1).wait()
    with pytest.raises(TimeoutError):
        Meeting(tmp_path / "two", 0, 2).wait(timeout_seconds=0.1)


@pytest.mark.parametrize(
    ("way", "passes"),
    [("mpidist symmetric", 2), ("mpidist symmetric per node", 1.25), ("mpidist", 5), ("raw", None)],
)
def test_traffic_of_four_ranks(way: str, passes: float | None) -> None:
    assert traffic_bytes(way, 1000, 4) == (passes and 1000 * passes)


def test_faster_raw_way_is_what_counts() -> None:
    one = work.Work("list", "resnet50", ((1,),))
    times = {("mpich", "raw"): 3.0, ("openmpi", "raw in place"): 2.0, ("mpich", "mpidist in place"): 1.0}
    timings = [Timing(one, peer, way, 9, np.full(3, us), 1) for (peer, way), us in times.items()]
    (first, *_) = targets.verdicts(timings, ranks=2, cpus=2)
    assert first.text == "resnet50: mpidist in place (mpich) / raw in place (openmpi)"
    assert (first.asked, first.got, first.is_met) == (">= 1.15", "2.00 (2.00 to 2.00)", True)


def test_every_library_has_a_place_to_be_looked_for() -> None:
    assert all(peer.folder.startswith(".venv") for peer in PEERS)


def test_watching_is_measured(tmp_path: Path) -> None:
    options = ["--rounds", "2", "--seconds", "0.02", "--late", "2", "--sizes", "64,1M", "--out", str(tmp_path)]
    command = [*Launcher.find(None).command, "-n", "2", sys.executable, str(BENCHMARKS / "watching.py"), *options]
    environment = {**clean_environment(), "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [path.name for path in sorted(tmp_path.iterdir())]
    assert [name.split("-", 2)[2] for name in found] == ["2-ranks-2-times.csv", "2-ranks-2.csv"]
    with (tmp_path / found[0]).open(newline="") as file:
        recorder, late = csv.DictReader(file)
    assert 0 < float(recorder["us"]) < 50
    assert 0 <= float(late["ms_low"]) <= float(late["ms"]) < 500
    with (tmp_path / found[1]).open(newline="") as file:
        assert [row["case"] for row in csv.DictReader(file)][:3] == ["no check", "check", "check, deadline"]
