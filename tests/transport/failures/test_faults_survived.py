"""Faults after which a program may go on: the rank is named, and the next call works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from jobs.faults import (
    BLOCKS,
    CYCLIC,
    FOUR,
    THREE,
    TWO,
    TWO_APART,
    UNEVEN,
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


in_session = on(TWO, TWO_APART, UNEVEN, BLOCKS, CYCLIC)


@in_session
def test_late_rank_is_named_by_all_that_waited_and_learns_it(sessions: Sessions, placement: Placement) -> None:
    ended = sessions.run(placement)
    named = late(placement.faulty, size=placement.size)
    require_deadline(of_others(ended, "late rank", placement), rf"^reduce \(call \d\) on rank \d .*(: |, and ){named}")
    last = ended.of("late rank")[placement.faulty]
    assert last.kind == "DeadlineExceededError"
    assert re.search(rf"on rank {placement.faulty} cannot complete: ranks? .* had given up waiting", last.text)
    require_right(ended, "late rank", placement)


@in_session
def test_rank_that_leaves_a_call_out_is_named(sessions: Sessions, placement: Placement) -> None:
    ended = sessions.run(placement)
    named = late(placement.faulty, size=placement.size)
    others = of_others(ended, "missing call", placement)
    require_deadline(others, rf"^reduce \(call \d\) on rank \d .*(: |, and ){named}")
    require_right(ended, "missing call", placement)


@in_session
def test_rank_that_resets_too_early_is_named_at_once(sessions: Sessions, placement: Placement) -> None:
    """It waits for the others, and they would wait for it: nobody has to wait for a deadline."""
    ended, rank = sessions.run(placement), placement.faulty
    instead = rf"rank {rank} called reset\(\) instead, after call \d"
    for note in of_others(ended, "early reset", placement):
        assert note.kind == "PeerFailedError", note
        assert re.search(rf"{instead}|rank {rank} of \d ranks did not join it, and .* had given up", note.text), note
    require_right(ended, "early reset", placement)


DIFFERENCES = {
    "other call": (r"^call \d+: the ranks did not pass the same", "call: {others}: reduce; rank {faulty}: gather"),
    "other shape": (
        r"^reduce \(call \d+\): the ranks did not pass the same",
        "array 0: {others}: f64[2]; rank {faulty}: f64[3]",
    ),
}


@in_session
@pytest.mark.parametrize("what", DIFFERENCES)
def test_rank_that_calls_otherwise_is_named_on_all_ranks(sessions: Sessions, placement: Placement, what: str) -> None:
    ended = sessions.run(placement)
    head, line = DIFFERENCES[what]
    parts = line.format(others=name_ranks(placement.others), faulty=placement.faulty).partition(": ")
    texts = {note.text for note in ended.of(what).values() if note.kind == "InvalidArgumentError"}
    assert len(texts) == 1
    text = texts.pop()
    assert re.search(head, text)
    assert sorted(text.splitlines()[1].partition(": ")[2].split("; ")) == sorted(parts[2].split("; "))
    assert {*ended.of(what)} == {*range(placement.size)}
    require_right(ended, what, placement)


@in_session
def test_exception_of_one_rank_is_that_of_all(sessions: Sessions, placement: Placement) -> None:
    ended = sessions.run(placement)
    notes = ended.of("exception")
    assert {*notes} == {*range(placement.size)}
    for note in notes.values():
        assert (note.kind, note.text) == ("FileNotFoundError", "no shard 7")
    require_right(ended, "exception", placement)


@in_session
def test_rank_that_has_no_memory_is_named_and_all_may_go_on(sessions: Sessions, placement: Placement) -> None:
    """The real thing: a limit of the kernel. Results have memory before the ranks agree on the call."""
    ended = sessions.run(placement)
    for note in ended.of("no memory").values():
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


@on(TWO, UNEVEN, BLOCKS)
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
"""
# Enough for MPICH to start the ranks, too little for the slots of mpidist.
SMALL = {2: "3800k", 3: "4600k", 4: "5400k"}


def where_memory_is_small(ranks: int) -> list[str]:
    """Return the words before a command that give it a /dev/shm of its own with little space."""
    unshare = [shutil.which("unshare") or "unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={SMALL[ranks]} tmpfs /dev/shm"
    try:
        subprocess.run([*unshare, mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a mount namespace, and cannot have one: {error}")
    return [*unshare, f'{mount} && exec "$@"', "sh"]


@on(TWO, UNEVEN, FOUR)
def test_no_space_in_shared_memory_is_told_once_and_ranks_send_messages(job: Job, placement: Placement) -> None:
    ended = job(NO_SPACE, placement, before=where_memory_is_small(placement.size))
    assert (ended.status, ended.out) == (0, "")
    total = placement.size * (placement.size + 1) / 2
    texts = [note.text for note in ended.of("sum").values()]
    assert texts == [f"np.float64({300_000 * total})"] * placement.size
    reason = r"ranks of a node send messages .*iB cannot be had in /dev/shm \(No space left on device\); ask for less"
    assert len([line for line in ended.err.splitlines() if re.search(reason, line)]) == 1  # MPI may add its own


@on(THREE, BLOCKS)
def test_no_space_in_shared_memory_is_an_error_of_all_ranks_that_want_it(job: Job, placement: Placement) -> None:
    before = where_memory_is_small(placement.size)
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
