"""`python -m mpidist trace merge`: who waited for whom, told from files with known answers."""

import json
import os

import pytest
from support.trace_events import process_of, read_events

from mpidist.__main__ import run_command
from mpidist.transport.trace.trace import TRACE_VERSION

pytestmark = pytest.mark.no_mpi

MS = 1_000_000
BEGIN = 5_000 * MS
TEXTS = {"1": ["reduce", "SUM of 3 x float32"], "2": ["gather", ""], "3": ["start_all_reduce", ""]}


def call(number, begun, agreed, ended, text=1):
    """A call that all ranks make together; times in milliseconds after the beginning, 0 for what did not happen."""
    times = (BEGIN + round(MS * one) if one else 0 for one in (begun, agreed, ended))
    return [number, number + 7, text, *times]


def write(folder, rank, calls, size=2, ahead=0, clock="clock", clocks=None, end=True, waits=None, **other):
    """Write the file of a rank whose clock is ahead of that of the first host."""
    shifted = [row[:3] + [time and time + ahead for time in row[3:]] for row in calls]
    first, last = clocks or ([["clock", BEGIN, 0, 0]], [["clock", BEGIN + 900 * MS, 0, 0]])
    header = {"version": TRACE_VERSION, "trace": "one", "group": "a1b2", "rank": rank, "size": size, "host": "node1"}
    header |= {"world_rank": rank, "clock": clock, "time": BEGIN + ahead, "wall": 10**18 - ahead, "clocks": first}
    seen = BEGIN + ahead + 900 * MS
    pieces = [header | other, {"time": seen, "texts": TEXTS, "calls": shifted, "entered": [], "waits": waits or []}]
    pieces += [{"end": seen, "clocks": last}] * end
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}-a1b2.jsonl"
    path.write_text("".join(json.dumps(piece) + "\n" for piece in pieces))
    return path


@pytest.fixture
def merge(tmp_path, capsys):
    """Run the command in a folder, require its exit status, and return what it prints."""

    def run(*arguments, folder=tmp_path, status=0):
        assert run_command(["trace", "merge", str(folder), *arguments]) == status
        out, err = capsys.readouterr()
        return " ".join((out + err).split())

    return run


def slices(folder, name, rank):
    events = read_events(folder / "trace.json")
    return [
        (event["ts"] / 1000, event["dur"] / 1000)
        for event in events
        if event["ph"] == "X" and event["name"] == name and event["pid"] == process_of(rank)
    ]


EARLY = [call(0, 10, 21, 30), call(1, 40, 61, 70), call(2, 80, 81, 90, 2)]
LATE = [call(0, 20, 21, 30), call(1, 60, 61, 70), call(2, 80.5, 81, 90, 2)]


def test_merge_names_last_rank_and_waits_for_it(tmp_path, merge):
    write(tmp_path, 0, EARLY, waits=[BEGIN + 22 * MS, BEGIN + 25 * MS])
    write(tmp_path, 1, LATE)
    text = merge()
    assert "Strategy a1b2, 2 ranks: 3 calls that all made together" in text
    assert "ranks waited 30.5 ms in all for others to come, 30.5 ms of it for rank 1, which came last to 3 of 3" in text
    assert "the longest wait: rank 0 waited 20 ms for rank 1 in call 8, reduce (SUM of 3 x float32)" in text
    assert " 0 node1 3 60 ms (7 %) 0 s 33 ms rank 1: 30.5 ms 3 ms 24 ms 0 s " in text
    assert " 1 node1 3 29.5 ms (3 %) 0 s 2.5 ms - 0 s 27 ms 30.5 ms =>" in text
    assert slices(tmp_path, "waiting for ranks", 0) == [(10, 11), (40, 21), (80, 1)]
    assert slices(tmp_path, "exchange", 0) == [(22, 3)]
    assert slices(tmp_path, "adding", 0)[:2] == [(21, 1), (25, 5)]


@pytest.mark.parametrize("drift", [0, 3 * MS])
def test_clocks_of_hosts_are_aligned(tmp_path, merge, drift):
    """As they are, the times of the second host would say that the first one was late; drift is within the trace."""
    ahead = -70_000 * MS
    first = [["clock", BEGIN, 0, 0], ["other", BEGIN + ahead, -ahead, 4000]]
    last = [["clock", BEGIN + 900 * MS, 0, 0], ["other", BEGIN + 900 * MS + ahead + drift, -ahead - drift, 9000]]
    drifted = [row[:3] + [time + (time - BEGIN) * drift // (900 * MS) for time in row[3:]] for row in LATE]
    write(tmp_path, 0, EARLY, clocks=(first, last))
    write(tmp_path, 1, drifted, clocks=(first, last), clock="other", ahead=ahead, host="node2")
    text = merge()
    assert "2 hosts, clocks aligned to 9 us" in text
    assert "ms of it for rank 1, which came last to 3 of 3" in text
    for (begun, _), (needed, _) in zip(slices(tmp_path, "reduce", 1), [(20, 10), (60, 10)], strict=True):
        assert abs(begun - needed) < 0.02


def test_merge_clocks_compared_once_are_noted(tmp_path, merge):
    first = [["clock", BEGIN, 0, 0], ["other", BEGIN, 0, 4000]]
    for rank, clock in enumerate(("clock", "other")):
        write(tmp_path, rank, EARLY, clocks=(first, []), end=False, clock=clock)
    text = merge()
    assert "note: the clocks of hosts were compared at the beginning alone, and may have drifted since" in text
    assert "note: ranks 0-1 of strategy a1b2: the trace has no end" in text


def test_hosts_without_a_strategy_in_common_are_aligned_by_the_time_of_day(tmp_path, merge):
    ahead = 50_000 * MS
    write(tmp_path, 0, EARLY, size=1)
    own = [["other", BEGIN + ahead, 0, 0]]
    write(tmp_path, 1, EARLY, size=1, ahead=ahead, clock="other", clocks=(own, own), group="c3d4")
    assert "aligned by the time of day alone" in merge()
    assert slices(tmp_path, "reduce", 0) == slices(tmp_path, "reduce", 1)


def test_hosts_that_share_a_clock_are_counted(tmp_path, merge):
    write(tmp_path, 0, EARLY)
    write(tmp_path, 1, LATE, host="node2")
    assert "2 hosts, one clock" in merge()


def test_missing_rank_is_named_and_blames_nobody(tmp_path, merge):
    write(tmp_path, 0, EARLY, size=3)
    write(tmp_path, 2, LATE, size=3)
    text = merge()
    assert "note: rank 1 of strategy a1b2 left no file that can be read" in text
    assert "=> no rank waited for another" in text


def test_rank_that_never_came_is_blamed(tmp_path, merge):
    write(tmp_path, 0, [*EARLY, call(3, 100, 0, 0)])
    write(tmp_path, 1, LATE)
    text = merge()
    assert "the longest wait: rank 0 waited 800 ms for rank 1 in call 10, reduce" in text


def test_killed_rank_is_not_blamed_for_calls_that_it_joined(tmp_path, merge):
    """The last second of its trace is missing, and the others know that all came."""
    write(tmp_path, 0, [*EARLY, call(3, 100, 700, 710)])
    write(tmp_path, 1, LATE, end=False)
    text = merge()
    assert "ranks waited 30.5 ms in all for others to come, 30.5 ms of it for rank 1, which came last to 3 of 4" in text


def test_torn_and_empty_files_are_read_as_far_as_they_go(tmp_path, merge):
    path = write(tmp_path, 0, EARLY, end=False)
    path.write_text(path.read_text() + '{"time":52')
    write(tmp_path, 1, LATE)
    (tmp_path / "rank-2-a1b2.jsonl").write_text('{"vers')
    text = merge()
    assert "note: rank 0 of strategy a1b2: the trace has no end" in text
    assert "note: rank-2-a1b2.jsonl is empty" in text
    assert "30.5 ms of it for rank 1" in text


def test_call_that_was_written_again_counts_once(tmp_path, merge):
    path = write(tmp_path, 0, EARLY)
    header, piece, end = path.read_text().splitlines()
    open_piece = json.loads(piece)
    open_piece["calls"] = [call(2, 80, 0, 0, 2)]
    path.write_text("\n".join([header, json.dumps(open_piece), piece, json.dumps(open_piece), end, ""]))
    write(tmp_path, 1, LATE)
    merge()
    assert slices(tmp_path, "gather", 0) == [(80, 10)]


def test_requests_that_overlap_have_rows_of_their_own(tmp_path, merge):
    requests = [call(0, 10, 0, 40), call(1, 20, 0, 50), call(2, 45, 0, 60)]
    for row in requests:
        row[1] = 0  # not among the calls that all ranks make together
    write(tmp_path, 0, requests, size=1)
    text = merge()
    assert " 0 node1 3 50 ms (6 %) 0 s 0 s - 75 ms 0 s 0 s " in text
    events = read_events(tmp_path / "trace.json")
    rows = [(event["ts"] / 1000, event["tid"]) for event in events if event.get("cat") == "call"]
    assert rows == [(10, 1), (20, 2), (45, 1)]


def test_two_hundred_calls_at_once_stay_within_their_strategy(tmp_path, merge):
    """As `start_all_reduce` of each gradient of a model makes them."""
    write(tmp_path, 0, EARLY, size=1, group="c3d4").rename(tmp_path / "rank-0-c3d4.jsonl")
    write(tmp_path, 0, [call(at, 1 + at, 0, 800 + at / 2, 3) for at in range(200)], size=1)
    merge()
    events = read_events(tmp_path / "trace.json")
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert [names.count(f"strategy {group}, rank 0") for group in ("a1b2", "c3d4")] == [200, 1]


def test_merge_started_call_has_slices_of_its_waits_alone(tmp_path, merge):
    waits = [BEGIN + at * MS for at in (12, 14, 25, 28)]
    write(tmp_path, 0, [call(0, 10, 21, 40, 3)], size=1, waits=waits)
    merge()
    assert slices(tmp_path, "waiting for ranks", 0) == [(12, 2)]
    assert slices(tmp_path, "exchange", 0) == [(25, 3)]
    assert slices(tmp_path, "adding", 0) == []


@pytest.mark.parametrize(
    ("lines", "needed"),
    [
        (["[]"], "line 1, cannot be understood"),
        (['{"version": 999}'], "it has version 999; this mpidist reads version"),
        (["{}"], "line 1, cannot be understood: 'version'"),
        (["header", '{"calls": [[1, 2]], "time": 6}'], "cannot be understood: "),
        (["header", '{"calls": 3}'], "cannot be understood: "),
        ([], " are empty: their ranks were ended at once; see why, and trace the job again"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, merge, lines, needed):
    path = write(tmp_path, 0, EARLY)
    header = path.read_text().splitlines()[0]
    path.write_text("".join(f"{header if line == 'header' else line}\n" for line in lines))
    text = merge(status=2)
    assert text.startswith("mpidist trace: ")
    assert needed in text


@pytest.mark.parametrize(
    ("damaged", "note"),
    [
        (b"\0\0\0\n", ", line 1, cannot be understood: Expecting value: line 1 column 1 (char 0)"),
        (b'header\n{"calls":3}\n', " cannot be understood: TypeError: 'int' object is not iterable"),
        (b'{"version":1}\n', ", line 1, cannot be understood: it is not a trace of a rank"),
    ],
)
def test_file_that_cannot_be_understood_is_left_out(tmp_path, merge, damaged, note):
    write(tmp_path, 0, EARLY, size=3)
    path = write(tmp_path, 1, EARLY, size=3)
    write(tmp_path, 2, LATE, size=3)
    path.write_bytes(damaged.replace(b"header", path.read_bytes().split(b"\n")[0]))
    text = merge()
    assert f"rank-1-a1b2.jsonl{note}; it is left out" in text
    assert "note: rank 1 of strategy a1b2 left no file that can be read: waits for it are nobody's" in text
    assert len(slices(tmp_path, "reduce", 0)) == len(slices(tmp_path, "reduce", 2)) == 2


@pytest.mark.parametrize(("line", "why"), [(b"\0\0", "Expecting value: "), (b"3", "it is not a trace of a rank")])
def test_file_with_a_damaged_line_is_read_up_to_there(tmp_path, merge, line, why):
    path = write(tmp_path, 0, EARLY)
    *rest, end, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*rest, line, end, b""]))
    write(tmp_path, 1, LATE)
    text = merge()
    assert f"note: rank-0-a1b2.jsonl, line 3, cannot be understood: {why}" in text
    assert "note: rank 0 of strategy a1b2: the trace has no end" in text
    assert "30.5 ms of it for rank 1" in text


def test_files_of_several_traces_are_refused(tmp_path, merge):
    write(tmp_path, 0, EARLY)
    write(tmp_path, 1, LATE, trace="two")
    text = merge(status=2)
    assert "has files of 2 traces: one (rank-0-a1b2.jsonl and others); two (rank-1-a1b2.jsonl and others)" in text


def test_folders_without_files_are_refused(tmp_path, merge):
    text = merge(folder=tmp_path / "none", status=2)
    assert text.startswith(f"mpidist trace: there is no folder {tmp_path}/none: ranks write traces with MPIDIST_TRACE")
    (tmp_path / "file").touch()
    text = merge(folder=tmp_path / "file", status=2)
    assert text == f"mpidist trace: {tmp_path}/file is no folder; name its folder, {tmp_path}"
    (tmp_path / "empty").mkdir()
    text = merge(status=2)
    assert "has no files rank-N-....jsonl, and no folder that has" in text


def test_newest_trace_is_taken_and_the_file_named_is_written(tmp_path, merge):
    for name in ("20260101-000000-ab", "20260102-000000-ab"):
        write(tmp_path / name, 0, EARLY[: 1 + name.count("2")], size=1)
    text = merge("-o", str(tmp_path / "out.json.gz"))
    assert text.startswith(f"The newest trace in {tmp_path} is 20260102-000000-ab; 1 other one.")
    assert [event["name"] for event in read_events(tmp_path / "out.json.gz")].count("reduce") == 2
    text = merge("-o", str(tmp_path / "none" / "out.json"), status=2)
    assert f"{tmp_path / 'none' / 'out.json'} cannot be written: No such file or directory; name another" in text
    (tmp_path / "folder").mkdir()
    merge("-o", str(tmp_path / "folder"))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["trace.json"]


def test_trace_merge_output_to_a_link_or_a_pipe_keeps_it(tmp_path, merge):
    """A rename would put a file in the place of `/dev/stdout`."""
    write(tmp_path / "one", 0, EARLY, size=1)
    (tmp_path / "link.json").symlink_to("out.json")
    merge("-o", str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()
    assert read_events(tmp_path / "out.json")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    merge("-o", str(tmp_path / "pipe"))
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 1 << 16) == (tmp_path / "out.json").read_bytes()
    os.close(reader)
