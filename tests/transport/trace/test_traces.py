"""Traces: what ranks record of their calls, and what is left of it when a job ends otherwise than in order."""

import json
import os
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.replicas import inside
from support.trace_events import process_of, read_events
from transport.failures.clocks import let_time_pass, wait_for_late_rank

from mpidist import CommunicationOptions, MultiWorkerMirroredStrategy, OneDeviceStrategy
from mpidist.__main__ import run_command
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from mpidist.transport.agreement.agreement import SoloAgreement
from mpidist.transport.trace.clocks import compare_clocks, name_clock
from mpidist.transport.waiting import observers


@pytest.fixture
def folder(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path), 0))


def pieces_in(folder):
    paths = sorted(folder.glob("*/rank-*.jsonl"))
    return {int(path.name.split("-")[1]): [*map(json.loads, path.read_text().splitlines())] for path in paths}


def calls_of(pieces):
    """Return the calls in a file: number, sequence, name, begun, agreed, ended, each as written last."""
    texts = {int(number): text for piece in pieces for number, text in piece.get("texts", {}).items()}
    rows = {row[0]: row for piece in pieces for row in piece.get("calls", ())}
    return [[row[0], row[1], texts[row[2]][0], *row[3:]] for row in rows.values()]


def require_refused(comm, strategy, folder, kind, text):
    """Require that all ranks refuse a trace. Collective."""
    with raises_everywhere(comm, kind, text), strategy.trace(folder):
        raise AssertionError("nothing may be done untraced")
    assert strategy.reduce("SUM", 1.0) == comm.size


def merged(folder, capsys):
    """Merge, and return the events, and what was printed."""
    assert run_command(["trace", "merge", str(folder)]) == 0
    (path,) = folder.glob("**/trace.json")
    return read_events(path), capsys.readouterr().out


@one_and_two_nodes
@pytest.mark.core
def test_trace_records_all_calls(comm, placement, folder):
    num_steps = 300  # more than a piece has
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        with strategy.trace(folder):
            for step in range(num_steps):
                assert strategy.reduce("SUM", 1.0 + step) == comm.size * (1 + step)
            strategy.reduce("SUM", [np.ones(100_000), np.ones(3, np.float32)])
            strategy.gather(np.ones(2), 0)
        strategy.reduce("SUM", 1.0)
        comm.Barrier()
        pieces = pieces_in(folder)
        assert sorted(pieces) == list(range(comm.size))
        for of_rank in pieces.values():
            calls = calls_of(of_rank)
            names = [call[2] for call in calls]
            assert names == ["reduce"] * (num_steps + 1) + ["gather", "the end of trace()"]
            assert [second[1] - first[1] for first, second in pairwise(calls)] == [1] * (num_steps + 2)
            for *_, begun, agreed, ended in calls[:-1]:
                assert of_rank[0]["time"] < begun <= agreed <= ended < of_rank[-1]["end"]
            entered = [time for piece in of_rank for time in piece.get("entered", ())]
            assert sum(time < calls[9][3] for time in entered) == 10
        waits = [time for piece in pieces[comm.rank] for time in piece.get("waits", ())]
        assert (len(waits) > 0) == (comm.size > 1)
        assert all(begun < ended for begun, ended in zip(waits[::2], waits[1::2], strict=True))


@one_and_two_nodes
def test_merged_file_shows_all_ranks(comm, placement, folder, capsys):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.trace(folder):
        started = [inside(strategy, "start_all_reduce", "SUM", np.ones(count)) for count in (100_000, 5)]
        strategy.reduce("SUM", np.ones(300_000))
        assert started[1].wait().tolist() == [comm.size] * 5
    comm.Barrier()
    if comm.rank == 0:
        events, text = merged(folder, capsys)
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert {pid: name.partition(" on ")[0] for pid, name in names.items()} == {
            process_of(rank): f"rank {rank}" for rank in range(comm.size)
        }
        assert "1 host, one clock" in text
        assert "note" not in text
        for rank in range(comm.size):
            own = [event for event in events if event["pid"] == process_of(rank) and event["ph"] == "X"]
            calls = [event["name"] for event in own if event["cat"] == "call"]
            assert calls == ["start_all_reduce", "start_all_reduce", "reduce", "the end of trace()"]
            assert {"adding", "staging"} <= {event["name"] for event in own}
            assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in own)
        assert any(event["name"] == "exchange" for event in events) == (comm.size > 1)


@pytest.mark.core
@pytest.mark.ranks(3)
def test_late_rank_is_named(comm, folder, capsys):
    """In four of the calls the last rank comes when all others wait, whatever else the machine does."""
    late, others = comm.size - 1, range(comm.size - 1)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.trace(folder):
        membership = parts_of(strategy).group.membership
        assert membership is not None
        for _ in range(4):
            number = parts_of(strategy).group.agreement.sequence + 1
            while comm.rank == late and not all(
                f"waits in reduce (call {number}), for" in line and "for 0.0 s" not in line
                for line in membership.status_lines(others)
            ):
                os.sched_yield()
            strategy.reduce("SUM", 1.0)
    comm.Barrier()
    if comm.rank == 0:
        events, text = merged(folder, capsys)
        assert f"of it for rank {late}, which came last to " in text
        assert f"for rank {late} in call " in text
        waits = [event for event in events if event["name"] == "waiting for ranks" and event["dur"] > 40_000]
        assert {event["pid"] for event in waits} >= set(map(process_of, others))


@pytest.mark.ranks(2)
def test_folder_that_cannot_be_written_is_an_error_of_all_ranks(comm, folder, monkeypatch):
    (folder / "file").write_text("")
    own = folder / "file"
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        text = r"no trace can be .*file: rank 0 \(.*\): Not a directory; give a folder that all ranks can write to"
        require_refused(comm, strategy, own, UnavailableError, text)
    monkeypatch.setenv("MPIDIST_TRACE", str(own))
    with raises_everywhere(comm, UnavailableError, "no trace can be written to"):
        MultiWorkerMirroredStrategy(comm=comm)
    monkeypatch.setenv("MPIDIST_TRACE", str(folder / "made" / "here"))
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        assert strategy.reduce("SUM", 1.0) == comm.size
    comm.Barrier()
    assert len(pieces_in(folder / "made" / "here")) == comm.size

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.delenv("MPIDIST_TRACE")
    if comm.rank == 1:
        monkeypatch.setattr("mpidist.transport.trace.trace.os.open", refuse)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        require_refused(comm, strategy, folder / "alone", UnavailableError, r": rank 1 \(.*\): Permission denied")
    assert pieces_in(folder / "alone") == {}


@pytest.mark.ranks(2)
def test_file_system_that_does_not_answer_ends_with_the_deadline(comm, folder, monkeypatch, clock):
    make, told = Path.mkdir, comm.Dup()

    def stand_still(path, **arguments):
        if comm.rank == 1 and folder in path.parents:
            let_time_pass(comm)
            told.recv(source=0)
        make(path, **arguments)

    monkeypatch.setattr(Path, "mkdir", stand_still)
    options = CommunicationOptions(timeout_seconds=600)
    with MultiWorkerMirroredStrategy(communication_options=options, comm=comm) as strategy:
        if comm.rank != 1:
            wait_for_late_rank(clock, comm, 1, lambda: False)
        with pytest.raises(DeadlineExceededError, match=r"trace\(\)|rank"), strategy.trace(folder):
            raise AssertionError("nothing may be done untraced")
        clock.in_wait = lambda: None
        if comm.rank == 0:
            told.send("others have given up", 1)
        comm.Barrier()
        assert pieces_in(folder) == {}
        strategy.reset()
        assert strategy.reduce("SUM", 1.0) == comm.size
    told.Free()


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused_together(comm, folder):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        require_refused(comm, strategy, 3, TypeError, "PathLike")
        with strategy.trace(folder):
            require_refused(comm, strategy, folder, RuntimeError, "traced already, to ")
        require_refused(comm, strategy, folder / str(comm.rank % 2), InvalidArgumentError, "folder")
        with raises_everywhere(comm, RuntimeError, "requires being in cross-replica context"):
            strategy.run(lambda: strategy.trace(folder))
        assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.ranks(3)
def test_two_strategies_are_traced_at_once(comm, folder, capsys, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRACE", str(folder))
    half = comm.Split(comm.rank % 2)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, MultiWorkerMirroredStrategy(comm=half) as part:
        for _ in range(3):
            strategy.reduce("SUM", 1.0)
            part.reduce("SUM", [1.0, 2.0])
        comm.Barrier()
        require_refused(comm, strategy, folder, RuntimeError, "already, to .*; leave .* or unset MPIDIST_TRACE")
    half.Free()
    comm.Barrier()
    if comm.rank == 0:
        (trace,) = {path.parent for path in folder.glob("*/*.jsonl")}
        assert len([*trace.glob("*.jsonl")]) == 2 * comm.size
        events, text = merged(folder, capsys)
        assert text.count("Strategy ") == 1 + min(comm.size, 2)
        assert len({event["tid"] for event in events if event["pid"] == process_of(0) and event["ph"] == "X"}) == 2


@pytest.mark.ranks(2)
def test_trace_records_no_calls_after_the_block(comm, folder):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        for _ in range(2):
            with strategy.trace(folder):
                strategy.reduce("SUM", 1.0)
            comm.Barrier()
        files = {path: path.stat().st_size for path in folder.glob("*/*.jsonl")}
        assert len(files) == 2 * comm.size
        for _ in range(300):
            strategy.reduce("SUM", 1.0)
        with raises_everywhere(comm, KeyError), strategy.trace(folder):
            strategy.reduce("SUM", 1.0)
            raise KeyError("of all ranks")
        strategy.reset()
        with strategy.trace(folder):
            strategy.reduce("SUM", 1.0)
            strategy.reset()
            strategy.reduce("SUM", 1.0)
            strategy.close()
    comm.Barrier()
    assert {path: path.stat().st_size for path in files} == files
    assert len([*folder.glob("*/*.jsonl")]) == 4 * comm.size
    assert sorted(len(calls_of(read(path))) for path in folder.glob("*/rank-0-*")) == [1, 2, 2, 4]


@pytest.mark.ranks(2)
def test_trace_left_by_an_exception_on_one_rank_is_an_error_of_all(comm, folder):
    strategy = MultiWorkerMirroredStrategy(comm=comm)
    with raises_everywhere(comm, InvalidArgumentError, "leave `with strategy.trace.*by an exception, or none"):
        with suppress(KeyError), strategy.trace(folder):
            if comm.rank == 1:
                raise KeyError("of this rank")
        strategy.reduce("SUM", 1.0)
    strategy.reset()
    strategy.close()


def read(path):
    return [*map(json.loads, path.read_text().splitlines())]


@pytest.mark.ranks(3)
def test_trace_that_one_rank_has_dropped_lets_the_strategy_close(comm, folder):
    """As a block does that is left while the strategy is closed elsewhere."""
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        block = strategy.trace(folder)
        block.__enter__()
        assert strategy.reduce("SUM", 1.0) == comm.size
        if comm.rank == 1:
            del block
    comm.Barrier()  # all have written their files
    pieces = pieces_in(folder)
    assert sorted(pieces) == [0, 1, 2]
    assert all("end" in rows[-1] for rows in pieces.values())


@pytest.mark.ranks(1)
def test_strategy_of_one_device_is_traced_too(folder, capsys):
    with OneDeviceStrategy() as strategy, strategy.trace(folder):
        strategy.reduce("SUM", np.ones(1000))
        strategy.reset()
        strategy.reduce("SUM", 1.0)
        agreement = parts_of(strategy).group.agreement
        assert isinstance(agreement, SoloAgreement)
        assert agreement.recorder is not None
    assert agreement.recorder is None
    events, text = merged(folder, capsys)
    assert [event["name"] for event in events if event.get("cat") == "call"] == ["reduce"] * 2 + ["the end of trace()"]
    assert "=> no rank waited for another" in text


@pytest.mark.ranks(2)
def test_forked_process_writes_in_no_file_of_its_parent(comm, folder):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.trace(folder):
        strategy.reduce("SUM", 1.0)
        (path,) = folder.glob(f"*/rank-{comm.rank}-*")
        before = path.read_bytes()
        child = os.fork()
        if child == 0:
            parts_of(strategy).group.trace.write()
            os._exit(path.read_bytes() != before)
        assert os.waitpid(child, 0)[1] == 0
    assert len(calls_of(read(path))) == 2


@pytest.mark.no_mpi
def test_more_calls_and_names_than_the_flight_recorder_keeps_are_recorded(tmp_path):
    num_calls = 5000
    with OneDeviceStrategy() as strategy, strategy.trace(tmp_path):
        for number in range(num_calls):
            with strategy.raise_together(f"work {number // 5}"):
                pass
    (pieces,) = pieces_in(tmp_path).values()
    texts = {int(number): text for piece in pieces for number, text in piece.get("texts", {}).items()}
    rows = {row[0]: row for piece in pieces for row in piece.get("calls", ())}
    assert [texts[row[2]][1] for row in rows.values()][:-1] == [f"work {at // 5}" for at in range(num_calls)]
    assert all(row[-1] for row in [*rows.values()][:-1])


@pytest.mark.no_mpi
def test_full_disk_or_its_own_length_ends_the_trace_and_not_the_program(tmp_path, monkeypatch, caplog, capsys):
    write = os.write
    with OneDeviceStrategy() as strategy, strategy.trace(tmp_path):
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
        for _ in range(600):
            assert strategy.reduce("SUM", 1.0) == 1
        monkeypatch.undo()
    assert caplog.text.count("there is no space left for it") == 1
    assert run_command(["trace", "merge", str(tmp_path)]) == 0
    monkeypatch.setattr("mpidist.transport.trace.trace._MAX_BYTES", 20_000)
    with OneDeviceStrategy() as strategy, strategy.trace(tmp_path / "long"):
        for _ in range(2000):
            strategy.reduce("SUM", 1.0)
    assert "and gets no more; trace a part of the program" in caplog.text
    assert run_command(["trace", "merge", str(tmp_path / "long")]) == 0
    assert "the trace was full before the end" in capsys.readouterr().out


@pytest.mark.no_mpi
def test_trace_that_cannot_begin_on_a_full_disk_gathers_nothing(tmp_path, monkeypatch, caplog):
    """It would keep waits, and times of calls, in memory until the program ends."""
    with monkeypatch.context() as patch, OneDeviceStrategy() as strategy:
        patch.setattr(os, "write", lambda file, data: 0)
        with strategy.trace(tmp_path):
            assert not observers
            strategy.reduce("SUM", 1.0)
            assert not parts_of(strategy).group.trace._entered
    assert (caplog.text.count("there is no space left for it"), observers) == (1, [])


KILLED = """
for step in range(400):
    strategy.reduce("SUM", 1.0)
print("reached", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
reduce_for_ever()
"""
EXITS = """
for step in range(400):
    strategy.reduce("SUM", 1.0)
if rank == 1:
    sys.exit(3)
strategy.reduce("SUM", 1.0)
"""


@pytest.mark.no_mpi
@pytest.mark.core
@pytest.mark.parametrize("program", [KILLED, EXITS], ids=["killed", "exits"])
def test_job_that_fails_leaves_files_that_can_be_read(job, tmp_path, program, capsys):
    relative = os.path.relpath(tmp_path / "trace")
    ended = job(f"os.chdir('/')\n{program}", ranks=2, MPIDIST_TRACE=relative, MPIDIST_FLIGHT_DIR="off")
    assert ended.status != 0
    assert program is KILLED or f"python -m mpidist trace merge {str(tmp_path)[1:]}/trace/" in ended.err
    pieces = pieces_in(tmp_path / "trace")
    assert sorted(pieces) == [0, 1]
    least = 128 if program is KILLED else 400  # half of what is written at once: a call may be there as it began, too
    assert min(len(calls_of(of_rank)) for of_rank in pieces.values()) >= least
    assert run_command(["trace", "merge", str(tmp_path / "trace")]) == 0
    assert ": the trace has no end" in capsys.readouterr().out


SERVERS = """
import numpy as np
import mpidist

strategy = mpidist.experimental.ParameterServerStrategy()
if strategy.is_ps:
    strategy.serve()
else:
    with strategy.scope():
        table = mpidist.Variable(np.zeros(1000), name="table")
    try:
        strategy.trace("here").__enter__()
    except RuntimeError as error:
        print(error, flush=True)
    for step in range(20):
        strategy.push([table], [np.ones(1000)])
        strategy.read([table])
    strategy.barrier()
strategy.close()
"""


@pytest.mark.no_mpi
def test_requests_to_parameter_servers_are_traced(job, tmp_path, capsys):
    ended = job(SERVERS, head="", MPIDIST_TRACE=str(tmp_path / "trace"))
    assert ended.status == 0, ended.err
    assert "whose ranks make no calls together: set MPIDIST_TRACE" in ended.out
    events, text = merged(tmp_path / "trace", capsys)
    calls = [(event["pid"], event["name"]) for event in events if event.get("cat") == "call"]
    assert [calls.count((process_of(rank), "read of 'table'")) for rank in range(3)] == [20, 20, 0], calls
    assert (process_of(2), "serve()") in calls
    assert "exchange" in text


SECOND = 1_000_000_000


def ahead_of(host):
    """By how much the clock of a pretended host is ahead of the machine's, in nanoseconds."""
    return (0, -7 * SECOND, 90_000 * SECOND, SECOND // 3)[host]


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_of_a_host", [1, 2])
def test_difference_of_clocks_is_found_within_the_error(comm, ranks_of_a_host):
    host = comm.rank // ranks_of_a_host
    num_hosts = (comm.size - 1) // ranks_of_a_host + 1
    samples = compare_clocks(comm, f"host{host}", lambda: time.monotonic_ns() + ahead_of(host))
    assert comm.allgather(samples) == [samples] * comm.size
    assert [sample.clock for sample in samples] == [f"host{one}" for one in range(num_hosts)]
    assert samples[0][2:] == (0, 0)
    for one, sample in enumerate(samples):
        assert abs(sample.offset + ahead_of(one)) <= sample.error
        assert sample.error < 60 * SECOND  # of messages on a busy machine
        assert abs(sample.time - ahead_of(one) - time.monotonic_ns()) < 100 * SECOND


@pytest.mark.ranks(2)
def test_ranks_of_a_host_have_one_clock(comm):
    (sample,) = compare_clocks(comm, name_clock())
    assert sample == (name_clock(), sample.time, 0, 0)
    assert compare_clocks(None, "alone")[0][2:] == (0, 0)
