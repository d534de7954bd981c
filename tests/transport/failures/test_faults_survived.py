"""Faults after which a program may go on: the rank is named, and the next call works."""

import os
import re
import shutil
import subprocess

import pytest
from jobs.faults import (
    BLOCKS,
    TWO,
    UNEVEN,
    UNEVEN_ALONE,
    Job,
    Placement,
    Sessions,
    job,
    late,
    of_others,
    on,
    require_deadline,
    require_right,
)
from jobs.ulfm import HAS_ULFM, survivor

from mpidist.transport.text import name_ranks

__all__ = ["job", "survivor"]

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]


SESSION = """
def go_on(what):
    strategy.reset()
    attempt(what + ", after", reduce)

if is_faulty:
    await_notes("late rank", *others)
attempt("late rank", lambda: reduce(DEADLINE))
go_on("late rank")

if is_faulty:
    await_notes("missing call", *others)  # and makes another call only when the others have given up
else:
    attempt("missing call", lambda: reduce(DEADLINE))
go_on("missing call")

if not is_faulty:
    attempt("early reset", lambda: reduce(PATIENT))
go_on("early reset")

attempt("other call", lambda: strategy.gather(np.ones(1), 0) if is_faulty else reduce())
attempt("other call, after", reduce)
attempt("other shape", lambda: strategy.reduce("SUM", np.ones(3 if is_faulty else 2)))
attempt("other shape, after", reduce)

def read():
    with strategy.raise_together("reading"):
        if is_faulty:
            raise FileNotFoundError("no shard 7")
attempt("exception", read)
attempt("exception, after", reduce)

value = np.ones(9_000_000)  # more than the 64 MiB of addresses that the C library reserves for other threads' memory
def all_reduce():
    return strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", value)).sum()
gc.collect()  # what earlier resets have left would make room otherwise
if is_faulty:
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 20), resource.RLIM_INFINITY))
attempt("no memory", all_reduce)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
strategy.reset()
attempt("no memory, after", all_reduce)
"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    return Sessions(tmp_path_factory.mktemp("sessions"), SESSION)


in_session = on(TWO, UNEVEN_ALONE, BLOCKS)


@in_session
def test_rank_that_does_not_come_to_a_call_is_named_by_all_that_waited(
    sessions: Sessions, placement: Placement
) -> None:
    """It comes late and learns it, leaves the call out, or resets, where nobody has to wait for a deadline."""
    ended, rank = sessions.run(placement), placement.faulty
    named = rf"^reduce \(call \d\) on rank \d .*(: |, and ){late(rank, size=placement.size)}"
    for what in ("late rank", "missing call"):
        require_deadline(of_others(ended, what, placement), named)
    last = ended.of("late rank")[rank]
    assert last.kind == "DeadlineExceededError"
    assert re.search(rf"on rank {rank} cannot complete: ranks? .* had given up waiting", last.text)
    assert "flight" not in last.text, "no files are wanted"
    instead = rf"rank {rank} called reset\(\) instead, after call \d"
    for note in of_others(ended, "early reset", placement):
        assert note.kind == "PeerFailedError", note
        assert re.search(rf"{instead}|rank {rank} of \d ranks did not join it, and .* had given up", note.text), note
    for what in ("late rank", "missing call", "early reset"):
        require_right(ended, what, placement)


DIFFERENCES = {
    "other call": (r"^call \d+: the ranks did not pass the same", "{others}: reduce; rank {faulty}: gather"),
    "other shape": (r"^reduce \(call \d+\): the ranks did not p", "{others}: f64[2]; rank {faulty}: f64[3]"),
}


@in_session
def test_rank_that_calls_otherwise_is_named_on_all_ranks(sessions: Sessions, placement: Placement) -> None:
    ended = sessions.run(placement)
    for what, (head, line) in DIFFERENCES.items():
        notes = ended.of(what)
        assert {(rank, note.kind) for rank, note in notes.items()} == {
            (rank, "InvalidArgumentError") for rank in range(placement.size)
        }
        (text,) = {note.text for note in notes.values()}
        assert re.search(head, text)
        sides = line.format(others=name_ranks(placement.others), faulty=placement.faulty).split("; ")
        assert sorted(text.splitlines()[1].partition(": ")[2].split("; ")) == sorted(sides)
        require_right(ended, what, placement)


@in_session
def test_error_of_one_rank_is_that_of_all_and_they_may_go_on(sessions: Sessions, placement: Placement) -> None:
    """Its memory is at its end for real, by a limit of the kernel: results have theirs before the ranks agree."""
    ended = sessions.run(placement)
    raised, refused = ended.of("exception"), ended.of("no memory")
    assert {*raised} == {*refused} == {*range(placement.size)}
    assert {(note.kind, note.text) for note in raised.values()} == {("FileNotFoundError", "no shard 7")}
    require_right(ended, "exception", placement)
    for note in refused.values():
        assert note.kind == "InvalidArgumentError"
        assert re.search(rf"an error on rank {placement.faulty}, so nothing was sent(.|\n)*MemoryError", note.text)
    sums = [note.text for note in ended.of("no memory, after").values()]
    assert sums == [f"np.float64({9_000_000.0 * placement.size})"] * placement.size


STALLS = """
err = os.path.join(os.path.dirname(os.environ["FAULT_NOTES"]), "err")
while is_faulty and open(err).read().count("\\n") < int(os.environ["WARNINGS"]):
    time.sleep(0.1)
attempt("stall", reduce)
"""


@on(UNEVEN)
def test_late_rank_is_named_in_a_warning_where_there_is_no_deadline(job: Job, placement: Placement) -> None:
    """Once on each node where ranks wait; and the call works."""
    waiting = {placement.nodes[rank] for rank in placement.others}
    ended = job(STALLS, placement, MPIDIST_STALL_SECONDS="2", WARNINGS=str(len(waiting)))
    assert (ended.status, ended.out) == (0, "")
    named = late(placement.faulty, size=placement.size)
    lines = ended.err.splitlines()
    assert len(lines) == len(waiting), ended.err
    pattern = rf"reduce \(call \d\) on rank \d has waited for \d+ s, and {named}; .*; it is at \S+program\.py:\d+ in"
    assert all(re.search(pattern, line) for line in lines), lines
    assert [note.text for note in ended.of("stall").values()] == [f"{placement.size:.1f}"] * placement.size


NO_SPACE = """
attempt("sum", lambda: strategy.reduce("SUM", np.full(300_000, rank + 1.0)).sum())
attempt("left", lambda: [name for name in os.listdir("/dev/shm") if name.startswith("mpidist-")])
"""
SMALL = "4600k"  # enough for MPICH to start three ranks, too little for the slots of mpidist


def where_memory_is_small() -> list[str]:
    """Return the words before a command that give it a /dev/shm of its own with little space."""
    unshare = [shutil.which("unshare") or "unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={SMALL} tmpfs /dev/shm"
    try:
        subprocess.run([*unshare, mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a mount namespace, and cannot have one: {error}")
    return [*unshare, f'{mount} && exec "$@"', "sh"]


@on(UNEVEN)
def test_no_space_in_shared_memory_is_told_once_and_ranks_send_messages(job: Job, placement: Placement) -> None:
    ended = job(NO_SPACE, placement, before=where_memory_is_small())
    assert (ended.status, ended.out) == (0, "")
    total = placement.size * (placement.size + 1) / 2
    texts = [note.text for note in ended.of("sum").values()]
    assert texts == [f"np.float64({300_000 * total})"] * placement.size
    assert {note.text for note in ended.of("left").values()} == {"[]"}
    reason = r"ranks of a node send messages .*iB cannot be had in /dev/shm \(No space left on device\); ask for less"
    assert len([line for line in ended.err.splitlines() if re.search(reason, line)]) == 1  # MPI may add its own


@on(UNEVEN)
def test_no_space_in_shared_memory_is_an_error_of_all_ranks_that_want_it(job: Job, placement: Placement) -> None:
    before = where_memory_is_small()
    ended = job(NO_SPACE, placement, before=before, MPIDIST_TRANSPORT="shared_memory")
    assert ended.status == 1
    assert ended.err.count("Traceback (most recent call last):") == 1
    assert re.search(r"UnavailableError: MPIDIST_TRANSPORT=shared_memory cannot be followed: rank \d: ", ended.err)
    assert "No space left on device" in ended.err


ALONE = """
value = np.ones({count})
num_done = 0

def die():
    while num_done < 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if is_faulty:
    threading.Thread(target=die, daemon=True).start()
error = None
while error is None:
    try:
        strategy.reduce("SUM", value)
        num_done += 1
    except Exception as problem:
        error = problem
note("error", kind=type(error).__name__, text=str(error))
"""


if HAS_ULFM:

    @pytest.mark.long
    @pytest.mark.parametrize("count", [1, 2_000_000], ids=["between calls", "while data move"])
    def test_a_rank_alone_on_its_node_is_named_where_mpi_says_that_it_is_gone(survivor: Job, count: int) -> None:
        """Nobody sees its process."""
        placement = Placement((0, 0, 1), 2)
        ended = survivor(ALONE.format(count=count), placement)
        for note in of_others(ended, "error", placement):
            assert note.kind == "PeerFailedError", note
            assert "MPI has found that the process of rank 2 has failed" in note.text, note
        assert "Exception ignored in atexit" not in ended.err
        assert re.search("a call failed before, and .*rank 2", ended.err)
