"""`python -m mpidist flight`: which ranks diverged, told from files with known answers."""

import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from mpidist.__main__ import run_command
from mpidist.transport.failures.flight_files import FILE_VERSION, GroupFlight, write_flight
from mpidist.transport.failures.flight_recorder import FlightEntry
from mpidist.transport.stacks import Stack

pytestmark = pytest.mark.no_mpi

NOW = 1_800_000_000.0
GRADIENTS = "SUM of 161 x float32, 97.5 MiB, hierarchical, 3 packs"
RESET = 1 << 40

Row = list[Any]


def row(sequence, call, state, began, details="", took=0.01):
    """A call that began `began` seconds ago."""
    begun = NOW - began
    agreed = begun + took / 2 if state in ("moving", "done") else 0.0
    return [sequence, call, details, state, begun, agreed, begun + took if state in ("done", "failed") else 0.0]


def group(rank, size, calls, process="running", token="a1b2"):
    return {"group": token, "rank": rank, "size": size, "process": process, "calls": calls}


def write(folder, rank, *groups, **other):
    told = {
        "version": FILE_VERSION,
        "world_rank": rank,
        "written_by": rank,
        "host": "node",
        "time": NOW,
        "reason": "SIGUSR1",
        "groups": list(groups),
        "stack": [[], ""],
        **other,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.json"
    path.write_text(json.dumps(told))
    return path


@pytest.fixture
def flight(tmp_path, capsys):
    """Run the command, look at its exit status, and return what it prints, with every sentence on one line."""

    def run(*arguments, status=None):
        assert run_command(["flight", str(tmp_path), *arguments]) == status or status is None
        out, err = capsys.readouterr()
        assert all(len(line) <= max(100, len(str(tmp_path)) + 4) for line in out.splitlines())
        return " ".join((out + err).split())

    return run


def calls_before(sequence, ended):
    """The two calls before a number, the last of them ended some seconds ago."""
    return [row(sequence - 2, "gather", "done", ended + 1), row(sequence - 1, "reduce", "done", ended + 0.01)]


def test_rank_behind_is_found_by_any_option(tmp_path, capsys, flight):
    stuck = [*calls_before(1041, 20), row(1041, "all_reduce", "moving", 12.0, GRADIENTS)]
    others = [*calls_before(1041, 20), row(1041, "all_reduce", "done", 12.0, GRADIENTS, took=0.8)]
    for rank in range(8):
        calls = stuck if rank == 5 else [*others, row(1042, "reduce", "waiting", 11.2)]
        write(tmp_path, rank, group(rank, 8, calls))
    text = flight(status=1)
    assert f"rank 5 is in call 1041, all_reduce ({GRADIENTS}), for 12 s: moving data " in text
    assert "ranks 0-4, 6-7 wait in call 1042, reduce, for 11.2 s " in text
    assert "=> rank 5 is behind: ranks 0-4, 6-7 went on 11.2 s ago, as far as call 1042, reduce Why" in text
    assert text.count("=>") == 1
    assert "8 files, of all ranks; written " in text
    assert "Strategy a1b2, 8 ranks " in text
    text = flight("--calls", "2")
    assert "reduce [waiting] [not yet: rank 5] Why" in text
    assert text.count("not yet") == 1
    text = flight("--rank", "5", status=1)
    assert "Strategy a1b2, rank 5 of 8, running" in text
    assert "1040 " in text
    assert f"5 ms - moving all_reduce: {GRADIENTS}" in text
    assert "1042" not in text
    assert "has no file of rank 9; it has ranks 0-7" in flight("--rank", "9", status=2)
    assert run_command(["flight", str(tmp_path), "--json"]) == 1
    (strategy,) = json.loads(capsys.readouterr().out)["strategies"]
    assert strategy["diverged"] is True
    assert [place["ranks"] for place in strategy["places"]] == [[5], [0, 1, 2, 3, 4, 6, 7]]
    assert strategy["places"][0]["last"]["sequence"] == 1041
    assert strategy["verdict"][0].startswith("rank 5 is behind")


def test_flight_prints_stacks_of_ranks(tmp_path, flight):
    for rank in range(4):
        frames = [["data.py", 12, "read"]] * (rank == 1) + [["train.py", 41, "step"], ["train.py", 90, "<module>"]]
        stack = [[], "it is gone"] if rank == 2 else [frames, ""]
        write(tmp_path, rank, group(rank, 4, calls_before(8, 30)), stack=stack)
    text = flight()
    title = "Where the ranks were in their programs (the whole stack: --rank R):"
    assert f" {title} ranks 0, 3: train.py:41 in step rank 1: data.py:12 in read Why the files" in text
    text = flight("--rank", "1")
    assert text.endswith(
        "Where it was, innermost first: data.py:12 in read train.py:41 in step train.py:90 in <module>"
    )
    text = flight("--rank", "2")
    assert "Where it was" not in text


class Case(NamedTuple):
    """What each rank of a strategy called, and what is to be told of it."""

    calls: list[list[Row] | None]  # of each rank; `None` where a rank has no file
    status: int  # the exit status
    said: list[str]  # texts that are printed
    unsaid: Sequence[str] = ()  # texts that are not
    process: tuple[int, str] = (-1, "")  # a rank whose process does not run, and its state
    time: dict[int, float] | None = None  # when files were written, by rank, if not now


def last_calls(*last):
    """Let each rank make call 6 and call 7, and then one more, or none."""
    return [calls_before(8, 30) + [call] * (call is not None) for call in last]


WAITS, MOVES, FAILED = row(8, "reduce", "waiting", 29), row(8, "reduce", "moving", 9), row(4, "reduce", "failed", 20)
STARTED = {state: row(8, "start_all_reduce", state, 29) for state in ("started", "moving")}
RESETS = row(RESET, "reset()", "waiting", 15)
HAS_RESET = row(RESET, "reset()", "done", 15)
SERVER = "parameter server 0 (rank 2)"
ASKED = row(0, "change of 'w'", "done", 50, SERVER)
ASKS = row(0, "read of 'w'", "waiting", 100, SERVER)
SERVES = row(0, "serve()", "moving", 10, f"{SERVER}: 12 requests, the last one of worker 1, rank 1")
CASES = {
    "started, and does not wait": Case(
        last_calls(STARTED["moving"], STARTED["started"], STARTED["moving"], STARTED["moving"]), 1,
        [
            "rank 1 started call 8, start_all_reduce, and did not wait for it or make another call for 29 s",
            "=> rank 1 is behind: ranks 0, 2-3 went on",
        ],
    ),
    "computes": Case(
        last_calls(WAITS, None, WAITS, WAITS), 1,
        [
            "rank 1 finished call 7, reduce, and made no call for 30 s",
            "=> rank 1 is behind: ranks 0, 2-3 went on 29 s ago, as far as call 8, reduce Why",
        ],
    ),
    "others went on when the first of them did": Case(
        [
            calls_before(8, 30),
            *(
                [
                    row(8, "gather", "done", 20.0 + rank), row(9, "gather", "done", 10), row(10, "reduce", "moving", 5),
                ] for rank in (1, 2)
            ),
        ], 1, ["rank 0 is behind: ranks 1-2 went on 22 s ago, as far as call 10"],
    ),
    "stopped just now": Case(
        [calls_before(8, 1), [*calls_before(8, 1), row(8, "reduce", "waiting", 0.05)]], 1,
        ["=> rank 0 is stopped, by a signal or a debugger => rank 0 is behind: rank 1 went on 50 ms ago"],
        process=(0, "stopped"),
    ),
    "stuck where others are done": Case(
        last_calls(*(row(8, "reduce", state, 5, took=1.0) for state in ("done", "done", "moving"))), 1,
        ["=> rank 2 is behind: ranks 0-1 went on 4 s ago, within call 8, reduce"],
    ),
    "another call": Case(
        [[row(57, "all_reduce", "failed", 3.1, GRADIENTS)]] * 3 + [[row(57, "gather", "failed", 3.0)]], 1,
        [
            f"=> at call 57 ranks 0-2 called all_reduce ({GRADIENTS}), rank 3 called gather ",
            f"ranks 0-2 failed in call 57, all_reduce ({GRADIENTS}), 3.09 s ago",
        ],
    ),
    "another call, unchecked": Case(  # ranks believe that they agree
        [
            [row(5, name, "done", 9, f"{rank} KiB"), row(6, "reduce", "moving", 8)]
            for rank, name in enumerate(("gather", "gather", "reduce"))
        ],
        1,
        ["=> at call 5 ranks 0-1 called gather (0 KiB), rank 2 called reduce (2 KiB) "],
    ),
    "two other calls": Case(
        [
            [row(4, "reduce", "done", 9), row(5, name, "failed", 8), row(6, other, "waiting", 7)]
            for name, other in (("reduce", "gather"), ("gather", "reduce"), ("reduce", "gather"))
        ], 1, ["=> at call 5 ranks 0, 2 called reduce, rank 1 called gather"], ["at call 6"],
    ),
    "other details": Case(
        [[row(9, "reduce", "failed", 3, details)] for details in ("8 KiB", "4 KiB", "4 KiB")], 1,
        [
            "=> at call 9 rank 0 called reduce (8 KiB), ranks 1-2 called reduce (4 KiB)",
            "rank 0 failed in call 9, reduce (8 KiB), 2.99 s ago ranks 1-2 failed in call 9",
        ],
    ),
    "other details that were agreed on": Case(  # ranks may gather arrays of different lengths
        [[row(number, "gather", "done", 9 - number, f"{rank} KiB") for number in (1, 2, 3)] for rank in range(3)],
        0,
        ["=> nobody diverged: all 3 ranks finished call 3, gather", "ranks 0-2 finished call 3, gather (0 KiB)"],
    ),
    "a text that a recorder lost": Case(
        [[row(3, name, "done", 5), row(4, "gather", "done", 4)] for name in ("a call", "reduce")], 0,
        ["=> nobody diverged"],
    ),
    "no file": Case(
        [*last_calls(WAITS, WAITS, WAITS), None, *last_calls(WAITS)], 1,
        [
            "4 files, 1 rank without one; written",
            "=> no file of rank 3: gone, or stuck or in one long call, and no process on the node wrote one",
        ],
    ),
    "gone": Case(
        last_calls(*[MOVES] * 4), 1,
        ["rank 2 (gone) was in call 8, reduce, begun 9 s ago: moving", "=> rank 2 is gone: the process"], ["behind"],
        process=(2, "gone"),
    ),
    "came when others had given up": Case(
        [[row(4, "reduce", "failed", began, took=took)] for began, took in ((10.0, 1.0), (7.0, 0.1), (10.0, 1.0))], 1,
        ["=> rank 1 came when others had given up, 3 s after the first rank"],
        time={0: NOW - 9, 1: NOW - 6.9, 2: NOW - 9},
    ),
    "clocks of ranks that agreed": Case(
        [[[4, "reduce", "", "failed", at, at + 1, at + 2]] for at in (NOW - 9, NOW - 4)], 0, []
    ),
    "failure of some": Case(
        [[row(4, "reduce", state, 7.0)] for state in ("failed", "moving", "moving")], 1,
        ["=> rank 0 failed, the others did not"],
    ),
    "all done": Case([[row(4, "reduce", "done", 5)]] * 3, 0, ["diverged: all 3 ranks finished call 4, reduce Why"]),
    "all move": Case([[row(4, "reduce", "moving", 5)]] * 3, 0, ["diverged: all 3 ranks are in call 4, reduce Why"]),
    "all failed": Case([[row(4, "reduce", "failed", 5)]] * 3, 0, ["nobody diverged: all 3 ranks failed in call 4"]),
    "a running job": Case(  # its ranks go on between the first file and the last one
        [[row(number, "reduce", "done", 9 - number) for number in range(1, last)] for last in (3, 7)],
        0,
        [
            "=> nobody diverged: the ranks are between call 2, reduce, and call 6, reduce, and none stayed behind",
            "within 6.5 s",
        ],
        time={0: NOW - 6.5},
    ),
    "no calls": Case([[], []], 0, ["=> nobody diverged: all 2 ranks made no call"]),
    "no calls of one": Case(
        [[], [row(1, "MirroredStrategy", "waiting", 5)]], 1,
        [
            "rank 0 made no call rank 1 waits in call 1, MirroredStrategy, for 5 s",
            "=> rank 0 is behind: rank 1 went on 5 s ago",
        ],
    ),
    "workers and servers": Case(  # whoever waits for a server, or serves, is not behind
        [[ASKED, ASKS], [ASKED], [SERVES]],
        0,
        [
            "rank 0 waits in read of 'w' (parameter server 0 (rank 2))",
            "rank 2 is in serve() (parameter server 0 (rank 2): 12 requests, the last one of worker 1, rank 1)",
            "=> no rank is lost: workers send requests to servers at any time",
        ],
    ),
    "a server that is stopped": Case(
        [[ASKED, ASKS], [ASKED], [SERVES]], 1, ["=> rank 2 is stopped, by a signal or a debugger"],
        process=(2, "stopped"),
    ),
    "more places than fit a screen": Case(
        [[row(rank + 1, "reduce", "moving", 50 - rank)] for rank in range(30)], 1,
        [
            "rank 7 is in call 8, reduce, for 43 s: moving data and 21 more places rank 29 is in call 30",
            "=> rank 3 is behind: rank 29 went on 21 s ago, as far as call 30, reduce => and 25 places",
        ],
    ),
    "a reset after calls": Case(
        [[FAILED, RESETS], [FAILED, RESETS], [FAILED]], 1,
        [
            "ranks 0-1 wait in reset(), for 15 s",
            "=> rank 2 is behind: ranks 0-1 went on 15 s ago, as far as reset()",
        ],
    ),
    "a reset before calls": Case(
        [[FAILED, HAS_RESET], [FAILED, HAS_RESET, row(5, "gather", "waiting", 14)]], 1,
        [
            "rank 0 finished reset(), and made no call for 14.99 s",
            "=> rank 0 is behind: rank 1 went on 14 s ago, as far as call 5, gather",
        ],
    ),
    "a number that was left out after a reset": Case(
        [
            [row(5, "reduce", "done", 30), row(6, "reduce", "failed", 25)],
            [row(5, "reduce", "failed", 29), HAS_RESET, row(7, "gather", "waiting", 14)],
        ], 1, ["rank 0 is behind: rank 1 went on 15 s ago, as far as call 7, gather"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_flight_names_diverged_ranks(name, tmp_path, flight):
    case = CASES[name]
    for rank, calls in enumerate(case.calls):
        if calls is not None:
            its = group(rank, len(case.calls), calls, case.process[1] if rank == case.process[0] else "running")
            write(tmp_path, rank, its, time=(case.time or {}).get(rank, NOW))
    text = flight(status=case.status)
    for wanted in case.said:
        assert wanted in text
    for unwanted in case.unsaid:
        assert unwanted not in text


def test_flight_reports_each_strategy_separately(tmp_path, flight):
    for rank in range(4):
        whole = group(rank, 4, [row(3, "reduce", "done", 5)], token="whole")
        calls = [row(70, "gather", "done", 9)] + [row(71, "reduce", "waiting", 8)] * (rank == 2)
        half = group(rank % 2, 2, calls, token=f"half{rank // 2}")
        write(tmp_path, rank, whole, half)
    text = flight(status=1)
    assert "Strategy whole, 4 ranks ranks 0-3 finished call 3, reduce, and made no call for 4.99 s => nobody" in text
    assert "Strategy half0, 2 ranks ranks 0-1 finished call 70, gather" in text
    assert "Strategy half1, 2 ranks; ranks 0-1 here are ranks 2-3 of the job rank 1 finished call 70" in text
    assert "=> rank 1 is behind: rank 0 went on 8 s ago, as far as call 71, reduce" in text
    assert "4 files, of all ranks" in text


def test_ranks_that_wait_for_each_other_in_two_strategies(tmp_path, flight):
    for rank in range(4):
        calls = {
            token: [row(6, "gather", "done", 9)]
            + [row(7, "reduce", "waiting", 8)] * ((rank == 3) == (token == "second"))
            for token in ("first", "second")
        }
        write(tmp_path, rank, *(group(rank, 4, its, token=token) for token, its in calls.items()))
    text = flight(status=1)
    assert "=> rank 3 is behind: ranks 0-2 went on 8 s ago, as far as call 7, reduce Strategy second" in text
    assert "rank 3 waits in call 7, reduce, for 8 s => ranks 0-2 are behind: rank 3 went on 8 s ago" in text


def test_rank_that_left_is_blamed_for_the_failures_of_others(tmp_path, flight):
    for rank in range(3):
        state, reason = ("done", "ValueError: bad file 7") if rank == 1 else ("failed", "mine.Failed: 1")
        write(tmp_path, rank, group(rank, 3, [row(3, "reduce", state, 5)]), reason=reason, left=rank == 1)
    text = flight(status=1)
    assert text.count("=>") == text.count("=> rank 1 left because of an exception: ValueError: bad file 7 Why") == 1
    for rank in range(3):
        write(tmp_path, rank, group(rank, 3, [row(3, "reduce", "done", 5)]), reason=f"OSError: {rank}", left=True)
    assert "=> nobody diverged: all 3 ranks finished call 3, reduce" in flight(status=0)


def test_job_without_strategies(tmp_path, flight):
    write(tmp_path, 0)
    assert "No strategy was in use." in flight(status=0)


def test_reasons_are_grouped(tmp_path, flight):
    for rank in range(9):
        reason = "SIGUSR1" if rank < 3 else f"ValueError: {rank}"
        write(tmp_path, rank, group(rank, 9, [row(1, "reduce", "done", 5)]), reason=reason)
    text = flight()
    assert text.endswith(
        "Why the files were written: ranks 0-2: SIGUSR1 rank 3: ValueError: 3 rank 4: ValueError: 4 "
        "rank 5: ValueError: 5 and 3 other reasons"
    )


def test_last_calls_name_the_straggler(tmp_path, flight):
    for rank in range(3):
        skew = rank * 100.0  # a clock of its own does not make a straggler
        late = 0.025 * (rank == 1)
        begun, agreed = NOW - 9 + late + skew, NOW - 8.9 + skew
        done = [7, "all_reduce", GRADIENTS, "done", begun, agreed, agreed + 0.004 + late]
        calls = [row(6, "gather", "done", 20), done, row(8, "reduce", "waiting" if rank else "failed", 5)]
        write(tmp_path, rank, group(rank, 3, calls), time=NOW + skew)
    text = flight("--calls", "2")
    assert f"rank 1 +25 ms 29 ms all_reduce: {GRADIENTS}" in text
    assert "reduce [failed rank 0 | waiting ranks 1-2]" in text
    assert "gather" not in text
    assert "within 3 min 20 s" in text


def test_flight_names_writer_for_another_rank(tmp_path, flight):
    write(tmp_path, 0, group(0, 1, []), written_by=3)
    assert "by rank 3, because it could not itself: SIGUSR1" in flight("--rank", "0")


@pytest.mark.parametrize("calls", ["0", "all"])
def test_wrong_number_of_calls_is_refused(calls, capsys):
    with pytest.raises(SystemExit) as end:
        run_command(["flight", "--calls", calls])
    assert end.value.code == 2
    assert f"{calls!r} is no number of 1 or more" in capsys.readouterr().err


def test_json_has_the_difference(tmp_path, capsys):
    for rank, call in enumerate(("gather", "reduce")):
        write(tmp_path, rank, group(rank, 2, [row(5, call, "failed", 3)]))
    assert run_command(["flight", str(tmp_path), "--json"]) == 1
    (strategy,) = json.loads(capsys.readouterr().out)["strategies"]
    sides = [{"call": "gather", "details": "", "ranks": [0]}, {"call": "reduce", "details": "", "ranks": [1]}]
    assert strategy["difference"] == {"sequence": 5, "sides": sides}


def test_newest_of_several_jobs_is_taken(tmp_path, flight):
    old = write(tmp_path / "job2", 0, group(0, 1, [row(1, "gather", "done", 5)]))
    os.utime(old, (1000, 1000))
    write(tmp_path / "job1", 0, group(0, 1, [row(2, "reduce", "done", 5)]))
    (tmp_path / "job3").mkdir()
    text = flight(status=0)
    assert text.startswith(f"The newest job in {tmp_path} is job1. {tmp_path / 'job1'}: 1 file,")
    assert "=> nobody diverged: the only rank finished call 2, reduce" in text


def test_default_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPIDIST_FLIGHT_DIR", raising=False)
    write(tmp_path / "mpidist-flight" / "job", 0, group(0, 1, [row(2, "reduce", "done", 5)]))
    assert run_command(["flight"]) == 0
    assert "The newest job in mpidist-flight is job." in capsys.readouterr().out
    monkeypatch.setenv("MPIDIST_FLIGHT_DIR", "elsewhere")
    assert run_command(["flight"]) == 2
    assert "there is no folder elsewhere" in capsys.readouterr().err
    monkeypatch.setenv("MPIDIST_FLIGHT_DIR", "off")
    assert run_command(["flight"]) == 2
    assert "MPIDIST_FLIGHT_DIR=off, so ranks write no flight recorders" in capsys.readouterr().err
    assert run_command(["flight", "mpidist-flight"]) == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPIDIST_FLIGHT_DIR", "~/mpidist-flight")
    assert run_command(["flight"]) == 0


def test_flight_folder_without_files_exits_with_2(tmp_path, flight):
    (tmp_path / "rank-0.1234").write_text("{")
    text = flight(status=2)
    assert f"{tmp_path} has no files rank-N.json" in text


BAD_CALL = group(0, 1, [[1, "reduce", "", "done", 1.0, 1.0]])
BAD_TIME = group(0, 1, [[1, "reduce", "", "done", 1.0, "soon", 1.0]])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"version": 2}, "ValueError: it has version 2; this mpidist reads version 1"),
        ({"time": "noon"}, "ValueError: could not convert string to float: 'noon'"),
        ({"world_rank": 3}, "ValueError: it belongs to rank 3"),
        ({"groups": [7]}, "TypeError: "),
        ({"groups": [{"group": "a"}]}, "KeyError: 'rank'"),
        ({"groups": [group(2, 2, [])]}, "ValueError: rank 2 of 2 ranks"),
        ({"groups": [BAD_CALL]}, "ValueError: not enough values"),
        ({"groups": [BAD_TIME]}, "ValueError: could not convert string to float: 'soon'"),
        (b"{", "JSONDecodeError: Expecting property name"),
        (b"[]", "TypeError: list indices"),
        (b"\xff", ""),
    ],
)
def test_flight_unreadable_file_exits_with_2(content, complaint, tmp_path, flight):
    if isinstance(content, bytes):
        path = tmp_path / "rank-0.json"
        path.write_bytes(content)
    else:
        path = write(tmp_path, 0, **content)
    text = flight(status=2)
    assert f"{path} cannot be understood: {complaint}" in text


def test_flight_contradictory_files_are_named(tmp_path, flight):
    write(tmp_path, 0, group(0, 2, []))
    path = write(tmp_path, 1, group(0, 2, []))
    text = flight(status=1)
    note = f"{path} cannot be understood: ValueError: rank 0 of a1b2 is in another file, too; it is left out"
    assert text.endswith(f"note: {note}")
    assert (
        "no file of rank 1: gone, or stuck or in one long call, and no process on the node wrote one, or damaged "
        in text
    )
    write(tmp_path, 1, group(1, 2, [], token="whole"), group(1, 3, []))
    text = flight(status=1)
    assert f"note: {path} cannot be understood: ValueError: a1b2 has 3 ranks, but 2 in other files;" in text
    assert "Strategy whole" not in text
    assert "but 2 in other files" in flight("--rank", "1", status=2)


def test_files_of_the_recorder_are_read(tmp_path, flight):
    now = time.monotonic_ns()
    entries = [
        FlightEntry(1, "MirroredStrategy", "", now - 9 * 10**9, now - 8 * 10**9, now - 7 * 10**9),
        FlightEntry(2, "reduce", GRADIENTS, now - 5 * 10**9, 0, -now + 4 * 10**9),
    ]
    write_flight(tmp_path, 0, "ValueError", [GroupFlight("a1b2", 0, 1, "", 0, entries)], Stack(), 0)
    text = flight(status=0)
    found = re.search(rf"rank 0 failed in call 2, reduce \({re.escape(GRADIENTS)}\), (\d+(\.\d+)?) s ago", text)
    assert found
    assert float(found[1]) >= 4
    write_flight(tmp_path, 0, "SystemExit: 75", [GroupFlight("a1b2", 0, 1, "", 0, entries)], Stack(), 0, True)
    assert "rank 0: ValueError" in flight()  # why the call failed says more


def test_hundreds_of_ranks_fit_a_screen(tmp_path, capsys):
    for rank in range(300):
        calls = [row(sequence, "reduce", "done", 900 - sequence, GRADIENTS) for sequence in range(rank % 50, 60)]
        at = 60 + rank % 20 if rank > 270 else 90
        calls += [row(sequence, "gather", "done", 800 - sequence, f"{rank} KiB") for sequence in range(60, at)]
        write(tmp_path, rank, group(rank, 300, calls), reason=f"on rank {rank}")
    assert run_command(["flight", str(tmp_path), "--calls", "5"]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 80
    assert "rank 270" not in out.partition("=>")[0]
    assert "and 5 places with ranks behind" not in out
