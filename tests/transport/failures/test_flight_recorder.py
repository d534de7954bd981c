"""The flight recorder: what a rank called last, for its neighbours, for files, and for `python -m mpidist flight`."""

import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from jobs.failing import SIGNS

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import PeerFailedError
from mpidist.transport.failures.flight_files import write_flight
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, MAX_CALLS, FlightRecorder, entries_in
from mpidist.transport.failures.status_board import StatusBoard
from mpidist.transport.stacks import Stack

TEXTS = 256  # that a recorder keeps


@pytest.mark.no_mpi
def test_flight_recorder_call_goes_through_its_states():
    memory = np.zeros(FLIGHT_BYTES, np.uint8)
    recorder = FlightRecorder(memory)
    assert entries_in(memory) == []
    assert recorder.last() is None
    before = time.monotonic_ns()
    recorder.begin(7, "all_reduce", "SUM of 3 x float32")
    states = []
    steps = (lambda: None, recorder.mark_started, lambda: recorder.mark_started(False), recorder.agree, recorder.end)
    for step in steps:
        step()
        entry = recorder.last()
        assert entry is not None
        states.append(entry.state)
    assert states == ["waiting", "started", "waiting", "moving", "done"]
    assert entry[:3] == (7, "all_reduce", "SUM of 3 x float32")
    assert before <= entry.begun <= entry.agreed <= entry.ended <= time.monotonic_ns()
    recorder.fail()  # an error after its end is another one's
    assert recorder.last() == entry
    recorder.begin(8, "gather")
    recorder.fail()
    assert [its.state for its in entries_in(memory)] == ["done", "failed"]


@pytest.mark.no_mpi
def test_flight_recorder_keeps_newest_calls_and_texts():
    memory = np.zeros(FLIGHT_BYTES, np.uint8)
    recorder = FlightRecorder(memory)
    for number in range(1, MAX_CALLS + 51):
        recorder.begin(number, f"call{number}" if number % 2 else "often", "x" * 500)
        recorder.end()
    entries = entries_in(memory)
    assert [its.sequence for its in entries] == list(range(51, MAX_CALLS + 51))
    names = [its.call for its in entries]
    assert names[-1] == "often"
    assert names[-2] == f"call{MAX_CALLS + 49}"
    assert names[0] in ("a call", "call51")
    assert entries[-1].details == "x" * len(entries[-1].details)  # cut, not garbled
    assert sum(name.startswith("call") for name in names) <= TEXTS


@pytest.mark.ranks(3)
def test_neighbours_read_it(comm):
    board = StatusBoard(comm, range(comm.size))
    board.recorder.begin(comm.rank + 1, "reduce")
    comm.Barrier()
    for rank, status in board.statuses().items():
        assert status.last is not None
        assert (status.rank, status.last.sequence, status.process) == (rank, rank + 1, "running")
        assert str(status).startswith(f"waits in reduce (call {rank + 1}), for ")
    assert board.gone() == ()
    comm.Barrier()
    board.free()


@pytest.mark.ranks(2)
def test_flight_recorder_has_calls_of_a_strategy(comm):
    with Strategy(comm=comm) as strategy:
        strategy.reduce("SUM", [np.ones(1000, np.float32), np.ones(3, np.float32)])
        strategy.gather(np.ones(3), 0)
        flight = parts_of(strategy).group.membership.flights()[comm.rank]
        calls = [(its.call, its.details, its.state) for its in flight.entries]
        assert calls[0][0] == "MultiWorkerMirroredStrategy"
        assert calls[1][0] == "reduce"
        assert calls[1][1].startswith("SUM of 2 x float32, 3.918 KiB, ")
        assert calls[2][:2] == ("gather", "1 x float64, 24 B")
        assert {state for _, _, state in calls} == {"done"}
        assert [its.sequence for its in flight.entries] == [1, 2, 3]


LATE = """
if rank == 1:
    await_signs("rank 0 has given up")
try:
    strategy.reduce("SUM", 1.0, options=mpidist.CommunicationOptions(timeout_seconds={seconds}))
except mpidist.errors.DeadlineExceededError as error:
    print(f"rank {{rank}}:", error, flush=True)
leave_sign(f"rank {{rank}} has given up")
strategy.close()
"""


def flight(folder, *arguments):
    command = [sys.executable, "-m", "mpidist", "flight", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.no_mpi
@pytest.mark.core
def test_flight_files_of_all_ranks_are_written_at_a_deadline(job, tmp_path):
    """Also of the one that is busy elsewhere; and the command names it."""
    ended = job(SIGNS + LATE.format(seconds=3), ranks=2, MPIDIST_FLIGHT_DIR=str(tmp_path / "flights"))
    assert ended.status == 0, ended.err
    (folder,) = (tmp_path / "flights").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}.json" for rank in range(2)]
    told = json.loads((folder / "rank-0.json").read_text())
    assert told["reason"].startswith("reduce (call 2) on rank 0 ")
    frames, problem = told["stack"]
    assert (frames[-1][2], problem) == ("<module>", "")
    status, said = flight(folder)
    assert status == 1
    assert "Where the ranks were in their programs" in said


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("end", "text"), [("raise ValueError('bad file')", "ValueError: bad file"), ("sys.exit(3)", "SystemExit: 3")]
)
def test_flight_names_the_rank_that_left_and_its_line(job, tmp_path, end, text):
    program = f"def leave():\n    {end}\nif rank == 1:\n    leave()\nstrategy.reduce('SUM', 1.0)\n"
    assert job(program, ranks=3, MPIDIST_FLIGHT_DIR=str(tmp_path)).status != 0
    status, said = flight(tmp_path)
    assert status == 1
    assert f"=> rank 1 left because of an exception: {text}\n" in said
    assert re.search(r"^  rank 1: \S+:\d+ in leave$", said, re.MULTILINE), said


@pytest.mark.no_mpi
def test_flight_file_has_no_rank_leave_that_follows_another(tmp_path):
    class OwnError(PeerFailedError):
        """As a program may define it: the text of the reason does not show what it is."""

    for end, left in ((ValueError("bad file"), True), (OwnError("of rank 1"), False), (None, False)):
        write_flight(tmp_path, 0, f"{end}", [], Stack(), 0, end)
        assert json.loads((tmp_path / "rank-0.json").read_text())["left"] == left


@pytest.mark.no_mpi
def test_flight_files_are_written_at_a_signal(job, tmp_path):
    program = """
for _ in range(3):
    strategy.reduce("SUM", 1.0)
if rank == 0:
    asks = threading.Thread(target=os.kill, args=[os.getpid(), signal.SIGUSR1])
    asks.start()
    asks.join()
    time.sleep(0.1)
strategy.reduce("SUM", 1.0)
"""
    ended = job(program, ranks=2, MPIDIST_FLIGHT_DIR=str(tmp_path), MPIDIST_LOG="debug")
    assert ended.status == 0, ended.err
    assert ended.err.count("mpidist DEBUG r0 | the flight recorder is written at SIGUSR1 (MPIDIST_FLIGHT_SIGNAL)") == 1
    assert "last calls of the ranks: python -m mpidist flight" in ended.lines_of(0)[0]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    told = json.loads((folder / "rank-0.json").read_text())
    assert told["reason"] == "SIGUSR1"
    (group,) = told["groups"]
    assert [call[:4] for call in group["calls"]][-1][:2] == [4, "reduce"]


@pytest.mark.no_mpi
def test_flight_files_that_cannot_be_written_are_no_new_error(job, tmp_path):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    ended = job(SIGNS + LATE.format(seconds=0.5), ranks=2, MPIDIST_FLIGHT_DIR=str(nowhere))
    assert ended.status == 0, ended.err
    assert "the last calls could not be written to" in ended.out
