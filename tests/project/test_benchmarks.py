"""The benchmarks: they run, they notice wrong results, and they leave out what they cannot measure."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi_session import clean_environment
from mpi_session.launch import Launcher

from mpidist.transport.costs.cost_model import CostModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import page  # noqa: E402
from harness.bounds import Link, Prediction  # noqa: E402
from harness.cases import works_of  # noqa: E402
from harness.environments import FOLDERS, PEERS, TUNED, environment_of  # noqa: E402
from harness.group import Group, GroupError  # noqa: E402
from harness.measuring import Timing  # noqa: E402
from harness.rank import Barrier  # noqa: E402
from harness.tables import lines_of, row_of  # noqa: E402
from harness.work import Way, Work, check, write_pattern  # noqa: E402

pytestmark = pytest.mark.no_mpi


SMALL = {
    "algorithms": ("--sizes", "4K", "--lists", ""),
    "checkpoints": ("--sizes", "1M"),
    "calls": ("--sizes", "4"),
    "reductions": ("--sizes", "64K"),
    "overlap": ("--sizes", "", "--lists", "2x1K"),
    "replicas": ("--sizes", "4", "--lists", "2x1K"),
}
WAY = Way([], lambda at: None)


def run(*options, launcher=()):
    """Run a benchmark, and require that it ends well."""
    command = [*launcher, sys.executable, str(BENCHMARKS), *options]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def measured(folder, *options):
    """Run a benchmark with the library of this environment, and return what it prints."""
    done = run(*options, "--env", f"mpich={sys.executable}", "--out", str(folder))
    assert "left out" not in done.stderr, done.stderr
    return done.stdout


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Measure the library of this environment, and one that is not there."""
    folder = tmp_path_factory.mktemp("results")
    said = measured(folder, "all_reduce", "--quick", "--peers", "mpich,gloo", f"--env=gloo={folder / 'python'}")
    return said, rows_in(folder / "all_reduce-2-ranks.csv"), folder


def test_quick_run_has_a_row_for_each_work_and_way(quick):
    found = {(row["work"], row["way"]) for row in quick[1]}
    ways = {"raw", "raw in place", "mpidist", "mpidist in place", "mpidist per node", "mpidist symmetric"}
    assert {(name, way) for name in ("4", "64K", "1M", "20x1K") for way in ways} <= found


def test_quick_run_records_medians_within_their_spread(quick):
    for row in quick[1]:
        assert 0 < float(row["us_low"]) <= float(row["us"]) <= float(row["us_high"])
        assert len(row["us_rounds"].split()) == int(row["rounds"])


def test_quick_run_prints_each_way_beside_its_baseline(quick):
    lines = [line for line in quick[0].splitlines() if line.startswith("mpidist in place (mpich)")]
    assert len(lines) == 4
    assert all(line.split("|")[2].rstrip().endswith(", raw in place (mpich)") for line in lines)


def test_library_that_is_missing_is_named_and_skipped(quick):
    assert "gloo: not installed: no environment" in quick[0]


def test_record_names_no_machine_and_no_path(quick):
    text = (quick[2] / "all_reduce-2-ranks.csv").read_text()
    assert os.uname().nodename not in text
    assert str(BENCHMARKS.parent) not in text


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ranks_are_asleep_between_turns():
    group = Group(PEERS[0], Path(sys.executable), 2)
    try:
        group.join()
        states = [_state(pid) for pid in group.pids]
        group.ask("prepare", kind="size", name="4", shapes=[[1]])
        assert states == [_state(pid) for pid in group.pids] == ["T", "T"]
    finally:
        group.close()


def test_failed_group_gives_its_error_and_ends():
    group = Group(PEERS[0], Path(sys.executable), 2)
    try:
        group.join()
        with pytest.raises(GroupError, match="KeyError: 'nonsense'"):
            group.ask("first", way="nonsense")
    finally:
        group.close()
    for pid in group.pids:
        while Path(f"/proc/{pid}").exists():  # their launcher, which was killed, is reaped by others
            time.sleep(0.02)


def _state(pid):
    for _ in range(6000):  # a signal is on its way for a moment, or longer on a busy machine
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


@pytest.mark.parametrize("part", [None, slice(900, 1900)])
def test_wrong_sum_in_the_middle_of_an_array_is_noticed(part):
    arrays, way = [np.empty((700, 3), np.float32)], Way([], lambda at: None, part=part)
    write_pattern(arrays, 1)
    total = 2 * arrays[0] - 1  # ranks 0 and 1
    got = total if part is None else total.reshape(-1)[part]
    check([got], way, [(700, 3)], 2, None)
    got.reshape(-1)[450] += 1
    with pytest.raises(ArithmeticError, match="1 of"):
        check([got], way, [(700, 3)], 2, None)


@pytest.mark.parametrize("sums", [[[5.0, 4.0]], [[5.0, 5.0, 5.0]], []])
def test_wrong_ends_and_shapes_are_noticed(sums):
    check([np.array([5.0, 5.0])], WAY, [(2,)], 2, 2)
    with pytest.raises(ArithmeticError):
        check([np.array(one) for one in sums], WAY, [(2,)], 2, 2)


def test_lists_are_read_by_name_and_by_number():
    sizes, lists = works_of("all_reduce", "64K,1M", ""), works_of("all_reduce", "", "3x1K,resnet50")
    assert [(one.nbytes, one.calls) for one in sizes] == [(64 << 10, 1), (1 << 20, 1)]
    assert [(len(one.shapes), one.nbytes > 3000) for one in lists] == [(3, True), (161, True)]
    with pytest.raises(argparse.ArgumentTypeError, match="reductions takes single arrays"):
        list(works_of("reductions", "", "resnet50"))


def test_barrier_ends_when_a_rank_does_not_come(tmp_path):
    Barrier(tmp_path / "alone", 0, 1).wait()
    with pytest.raises(TimeoutError):
        Barrier(tmp_path / "two", 0, 2).wait(timeout_seconds=0.1)


def test_prediction_is_that_of_the_model_for_its_algorithms_and_none_for_others():
    model, placement = CostModel(link_bytes_per_second=25e6), (2, 2)
    bound = Prediction(model, placement)
    assert bound.bound("two_shot", 1 << 20) == model.seconds("two_shot", 1 << 20, placement)
    assert bound.bound("mpidist", 4096) == model.seconds(model.choose(4096, placement), 4096, placement)
    assert bound.bound("ring", 4096) is None


def timing(peer, way, baseline, seconds, sent=()):
    one = Work("size", "1K", ((256,),), benchmark="network")
    return Timing(one, peer, way, baseline, 9.0, np.array(seconds), 1, sent)


def test_way_is_held_against_its_own_mpi_or_the_faster_one():
    raw = [timing("mpich", "raw in place", "", [3.0, 3.0]), timing("openmpi", "raw in place", "", [2.0, 4.0, 2.0])]
    ours, gloo = (
        timing("mpich", "mpidist", "raw in place", [1.0, 2.0]),
        timing("gloo", "gloo", "raw in place", [4.0] * 3),
    )
    old = timing("mpich@abc", "mpidist", "raw in place", [2.0, 6.0])
    rows = [row_of(one, [*raw, ours, gloo, old], None) for one in (raw[0], ours, gloo)]
    assert [row.get("baseline") for row in rows] == [None, "raw in place (mpich)", "raw in place (openmpi)"]
    assert [rows[1][name] for name in ("ratio", "ratio_low", "ratio_high")] == ["2.250", "1.500", "3.000"]
    assert [rows[1][name] for name in ("old_by_new", "old_by_new_low")] == ["2.500", "2.000"]
    assert rows[2]["ratio"] == "0.500"
    assert lines_of(rows)[-1].split("|")[2].strip() == "0.50 (0.50 to 1.00), raw in place (openmpi)"


def test_bytes_sent_by_hosts_are_compared_with_the_least():
    link = Link(hosts=2, bits_per_second=8192.0)
    row = row_of(timing("mpich", "mpidist", "", [2.0], (1024 + 660.0, 10.0)), [], link)
    assert (row["bound_us"], row["share_of_bound"], row["net_sent_to_least"]) == ("1000000.00", "0.500", "1.0000")


def test_libraries_have_a_folder_to_search():
    assert {peer.environment for peer in PEERS} <= set(FOLDERS)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("servers", "--peers=mpich"), "mpich is no library of servers: there are mpidist, messages, window"),
        (("calls", "--peers=mpich,gloo"), "gloo is no library of calls: there are mpich, openmpi, intel, torch, mpich"),
    ],
)
def test_peer_that_a_case_cannot_measure_is_refused_in_one_line(given, text):
    command = [sys.executable, str(BENCHMARKS), *given]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: {text}" in done.stderr.splitlines()[-1]


def test_named_ways_are_measured_after_other_work(tmp_path):
    options = ["--peers=mpich,mpich release-gather", "--sizes=4,64K", "--lists=", "--ways=mpidist,raw in place"]
    measured(tmp_path, "all_reduce", *options, "--after=64K", "--rounds=1", "--seconds=0.01")
    rows = rows_in(tmp_path / "all_reduce-2-ranks-after-other-work.csv")
    ways = [("mpich", "mpidist"), ("mpich", "raw in place"), ("mpich release-gather", "raw in place")]
    assert sorted((row["work"], row["peer"], row["way"]) for row in rows) == sorted(
        (work, *way) for work in ("4", "64K") for way in ways
    )
    assert {row["calls"] for row in rows} == {"1"}


def test_tuned_library_is_started_with_its_settings_for_raw_calls():
    tuned = {peer.name: peer for peer in TUNED}
    assert environment_of(tuned["intel pt2pt"], 2)["I_MPI_COLL_INTRANODE"] == "pt2pt"
    assert tuned["openmpi coll-sm"].options[:3] == ("--mca", "coll_sm_priority", "90")
    assert {peer.ways for peer in TUNED} == {("raw in place",)}


def test_performance_writes_a_row_for_each_number_and_keeps_other_runs(tmp_path):
    options = ["performance", "--quick", "--machine=m", f"--results={tmp_path}", f"--env=mpich={sys.executable}"]
    nobody = [f"--env={name}={tmp_path / 'python'}" for name in ("openmpi", "intel", "gloo", "horovod")]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "latest.csv").write_text("run,work\nafter,old\ngpu,kept\n")
    for name in ("after", "servers"):
        run(*options, f"--runs={name}", *nobody)
    rows = rows_in(tmp_path / "m" / "latest.csv")
    assert [row["work"] for row in rows if row["run"] == "gpu"] == ["kept"]
    assert {row["work"] for row in rows if row["run"] == "after"} == {"4", "64K"}
    assert {row["peer"] for row in rows if row["run"] == "servers"} >= {"mpidist", "messages"}
    measured_rows = [row for row in rows if row["run"] != "gpu"]
    assert all(0 < float(row["low"]) <= float(row["median"]) <= float(row["high"]) for row in measured_rows)


NUMBERS = """run,machine,work,bytes,peer,way,unit,median,date,version,setting,versions
node,m,64K,65536,mpich,mpidist in place,us,20,d,v,2 ranks,mpi MPICH 5
node,m,64K,65536,openmpi,mpidist in place,us,25,d,v,2 ranks,mpi Open MPI 5
node,m,64K,65536,mpich,raw in place,us,30,d,v,2 ranks,mpi MPICH 5
node,m,64K,65536,openmpi coll-sm,raw in place,us,10,d,v,2 ranks,mpi Open MPI 5
"""


def test_page_compares_with_the_fastest_tuned_library(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "latest.csv").write_text(NUMBERS)
    text = page.text_of_page(tmp_path).replace("\u00a0", " ")
    assert "| 64 KiB | 20 us (MPICH) | 30 us (MPICH) | 10 us (Open MPI, coll/sm) | 0.50 |" in text
    assert "* MPI, tuned, in a loop of calls: 64 KiB." in text
    assert "* MPI, defaults" not in text
    assert "MPICH 5, Open MPI 5" in text


@pytest.mark.parametrize("name", sorted(SMALL))
def test_benchmark_runs_and_its_results_are_right(tmp_path, name):
    measured(tmp_path, name, "--peers", "mpich", "--rounds", "1", "--seconds", "0.01", *SMALL[name])
    found = rows_in(tmp_path / f"{name}-2-ranks.csv")
    assert len(found) == len({(row["work"], row["way"]) for row in found}) >= 3


def test_shards_of_uneven_length_are_right(tmp_path):
    measured(tmp_path, "reductions", "--peers=mpich", "--ranks=3", "--sizes=4K", "--rounds=1", "--seconds=0.01")
    assert {"reduce_scatter", "all_gather"} <= {row["way"] for row in rows_in(tmp_path / "reductions-3-ranks.csv")}


def test_faults_names_the_rank_and_line_of_an_exception_by_mpidist_and_plain_mpi(tmp_path):
    pythons = [f"--env=mpich={sys.executable}", f"--env=openmpi={tmp_path}"]
    run("faults", "--faults=exception", "--tools=mpidist,mpich,openmpi", *pythons, f"--out={tmp_path}")
    *found, lacking = rows_in(tmp_path / "faults.csv")
    assert {row["tool"]: (row["line"], row["exit_code"]) for row in found} == dict.fromkeys(
        ("mpidist", "mpich"), ("right", "1")
    )
    by_mpidist, by_mpich = (row["named_seconds"] for row in found)
    assert float(by_mpidist) <= float(found[0]["end_seconds"])
    assert not by_mpich or float(by_mpich) <= float(found[1]["end_seconds"])  # its launcher may lose the last line
    assert lacking["text"] == "not installed: no environment"
    assert os.uname().nodename not in str(found)


def test_older_commit_is_measured_beside(tmp_path):
    """The commit of now: an older one may not be in a shallow copy of the repository."""
    if subprocess.run(["git", "-C", str(BENCHMARKS), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("there is no history of git here")
    options = ["--peers", "mpich,gloo", f"--env=gloo={tmp_path}", "--sizes", "4", "--lists", ""]
    said = measured(tmp_path, "all_reduce", *options, "--rounds", "1", "--seconds", "0.01", "--beside", "HEAD")
    found = rows_in(tmp_path / "all_reduce-2-ranks-beside-HEAD.csv")
    assert {row["peer"] for row in found} == {"mpich", "mpich@HEAD"}
    assert all(row["old_by_new"] for row in found if row["peer"] == "mpich")
    assert "old / new" in said
    assert "gloo: not installed" in said  # asked for, and beside an older mpidist


def test_ranks_of_a_job_are_measured(tmp_path):
    options = ["--sizes", "4", "--lists", "2x1K", "--rounds", "1", "--seconds", "0.01", "--out", str(tmp_path)]
    run("all_reduce", "--in-job", *options, launcher=[*Launcher.find(None).command, "-n", "2"])
    assert {row["peer"] for row in rows_in(tmp_path / "all_reduce-2-ranks.csv")} == {"job"}


def test_parameter_servers_are_compared_with_mpidist(tmp_path):
    measured(tmp_path, "servers", "--quick", "--sizes=4,64K")
    rows = rows_in(tmp_path / "servers-2-workers-1-servers.csv")
    found = [(row["work"], row["peer"], row["way"]) for row in rows]
    assert len(found) == len(set(found)) == 3 * 3 * 3
    baselines = {row["baseline"] for row in rows if row["peer"] == "window"}
    assert baselines == {f"{way} (mpidist)" for way in ("push", "pull", "push, pull")}


def test_time_that_is_added_is_compared_with_that_of_the_baseline():
    work = Work("list", "x", ((3,),), benchmark="torch_steps")
    ways = {"no reduction": ("", 2.0), "DDP over gloo": ("", 6.0), "all_reduce_gradients": ("DDP over gloo", 3.0)}
    timings = [
        Timing(work, "torch", way, base, 9.0, np.array([seconds] * 2), 1) for way, (base, seconds) in ways.items()
    ]
    rows = [row_of(one, timings, None) for one in timings]
    assert [row.get("added") for row in rows] == [None, None, "0.250"]
    assert lines_of(rows)[-1].split("|")[-1].strip() == "0.25"


def test_parts_of_a_work_hold_all_its_numbers():
    from backends.servers import place_parts

    large = Work("size", "64M", ((16 << 20,),))
    assert place_parts(large, 2) == [[8 << 20], [8 << 20]]
    assert place_parts(Work("list", "x", ((30000,), (7, 2), (5,), (1,))), 2) == [[30000, 5], [15]]
    assert place_parts(Work("size", "4", ((1,),)), 2) == [[1], []]


def test_servers_that_lose_a_push_are_noticed():
    from backends.servers import ServerBackend

    class Forgetful(ServerBackend):
        def __init__(self):
            self.size, self.servers, self.barrier = 1, 10_000, lambda: None  # too many to pin this process

        def begin(self, work):
            array, pushes = np.zeros(work.nbytes // 4), [0]

            def push():
                pushes[0] += 1
                array[pushes[0] - 1 :] += 1

            return push, lambda: [array]

    with pytest.raises(ArithmeticError, match=r"2 was expected everywhere, and 1.0 to 2.0 came back"):
        Forgetful().ways(Work("size", "16", ((4,),)))
