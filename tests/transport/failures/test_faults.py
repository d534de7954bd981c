"""Faults: the others say which rank it was; the job ends, and leaves nothing, or goes on, and the next call works."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import pytest
from jobs.faults import (
    BLOCKS,
    TWO,
    TWO_APART,
    UNEVEN,
    UNEVEN_ALONE,
    Placement,
    job,
    late,
    of_others,
    on,
    require_deadline,
    require_right,
)
from jobs.ulfm import HAS_ULFM, survivor

from mpidist.transport.failures.job_abort import EXIT_CODE_AFTER_FAILURE

__all__ = ["job", "survivor"]

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

REDUCE = "while True:\n    reduce()\n"
COMPUTE = "time.sleep(6000)\n"
IN_RUN = """
def step():
    if is_faulty:
        {}["mine"]
    mpidist.get_replica_context().all_reduce("SUM", 1.0)
with strategy, strategy.scope():
    strategy.run(step)
"""
IN_STARTED_CALL = """
def step(number):
    context = mpidist.get_replica_context()
    handle = context.start_all_reduce("sum", np.ones(300_000))
    if is_faulty and number == 3:
        {}["mine"]
    context.all_reduce("sum", 1.0)
    handle.wait()
for number in range(5):
    strategy.run(step, args=(number,))
"""
IN_CLOSE = """
try:
    for step in range(3):
        if step == 1 and is_faulty:
            {}["mine"]
        reduce()
finally:
    strategy.close()
"""
LITTLE_MEMORY = """
value = np.ones(3_000_000)
if is_faulty:
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 20), resource.RLIM_INFINITY))
"""
NO_MEMORY = f'{LITTLE_MEMORY}strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", value))'
LEAK = f"{LITTLE_MEMORY}    value = []\n    while True:\n        value.append(bytes(1000))\n{REDUCE}"
FOLLOWS = r"PeerFailedError: reduce \(call \d+\) on rank \d cannot complete: rank 1 ended: {}"
LEFT = r"PeerFailedError: .* rank \d left because of an exception: KeyError: 'mine'"


class Failure(NamedTuple):
    """A program whose faulty rank fails, and the end of the job."""

    placement: Placement
    program: str
    status: int  # the exit status of the job
    last: str  # the last line of the rank that tells of it
    others: str = ""  # the line of each other rank, as a pattern; without one, they print nothing
    tells: int = 1  # the rank that tells of it
    num_tracebacks: int = 1  # how many of them the job prints


def failing(how, others):
    """Return a program in which the faulty rank does something while the others reduce or compute."""
    return f"if is_faulty:\n    time.sleep(0.1)\n    {how}\n{others}"


def interrupted(does):
    """Return a program in which the faulty rank is interrupted while it does something."""
    return f"if is_faulty:\n    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()\n{does}"


FAILURES = {
    "exception, others reduce": Failure(
        UNEVEN, failing('{}["mine"]', REDUCE), 1, "KeyError: 'mine'", FOLLOWS.format("KeyError: 'mine'")
    ),
    "exception, others compute": Failure(TWO, failing('{}["mine"]', COMPUTE), 1, "KeyError: 'mine'"),
    "exception in run": Failure(TWO, IN_RUN, 1, "KeyError: 'mine'", LEFT),
    # The other rank learns of it in a started call, and raises in the call after that one.
    "exception between start and wait": Failure(
        TWO, IN_STARTED_CALL, 1, "KeyError: 'mine'", r"PeerFailedError: \w+ \(call \d+\) .* rank 1 ended: KeyError: 'mi"
    ),
    # The commonest form: the exception must not be lost, nor another rank's be shown for it.
    "exception under way in close": Failure(TWO._replace(faulty=0), IN_CLOSE, 1, "KeyError: 'mine'", LEFT, tells=0),
    # In a rank whose own memory is at its end: what tells the others needs some.
    "no memory": Failure(
        UNEVEN, NO_MEMORY, 1, "  error: ranks 0, 2: -; rank 1: MemoryError: Unable to allocate", tells=0
    ),
    # All of it is taken, and to print the line where that was, and to end the job, takes some.
    "no memory left": Failure(UNEVEN, LEAK, 1, "MemoryError", FOLLOWS.format("MemoryError")),
    "exit": Failure(TWO, failing("exit(5)", REDUCE), 5, "SystemExit: 5", FOLLOWS.format("SystemExit: 5")),
    "exit with a text": Failure(TWO, failing("sys.exit('no data')", COMPUTE), 1, "SystemExit: no data"),
    "exit of an earlier import": Failure(TWO, failing("early_exit(6)", COMPUTE), 6, "SystemExit: 6"),
    "SystemExit": Failure(
        TWO, failing("raise SystemExit(4)", REDUCE), 4, "SystemExit: 4", FOLLOWS.format("Sys"),
        num_tracebacks=int(sys.version_info >= (3, 12)),  # before, Python drops this one's traceback too early
    ),
    "SIGINT, all reduce": Failure(
        UNEVEN, interrupted(REDUCE), 130, "KeyboardInterrupt", r"\w+Error: reduce .*: rank 1.*KeyboardInterrupt"
    ),
    "SIGINT, others compute": Failure(
        TWO, interrupted("if is_faulty:\n    reduce()\n" + COMPUTE), 130, "KeyboardInterrupt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_a_rank_ends_the_job_with_one_report(job, tmp_path, name):
    """In lines that nobody else's stand between; and the exit status is also where a script asks for it."""
    failure, code = FAILURES[name], tmp_path / "code"
    program = f"os.chdir('/')\n{failure.program}"  # a relative path is of the folder of the start
    ended = job(program, failure.placement, MPIDIST_EXIT_CODE_FILE=os.path.relpath(code))
    assert (ended.status, code.read_text()) == (failure.status, f"{failure.status}\n"), ended
    assert ended.err.count("Traceback (most recent call last):") == failure.num_tracebacks, ended
    prefix = f"[rank {failure.tells} on {socket.gethostname()}] "
    lines = ended.err.splitlines()
    own = [at for at, line in enumerate(lines) if line.startswith(prefix)]
    assert own == list(range(own[0], own[0] + len(own))), ended.err
    assert lines[own[-1]].startswith(prefix + failure.last), ended.err
    for rank in {*range(failure.placement.size)} - {failure.tells}:
        said = ended.lines_of(rank)
        assert len(said) == bool(failure.others), ended.err
        assert all(re.match(failure.others, line) for line in said), said


DEATHS = {
    "os._exit": "os._exit(3)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    # Some ranks have its first message, complete the call without the others, and give up in the next one.
    "in a comparison": "CarryingRounds.has_passed = lambda _: os.kill(os.getpid(), signal.SIGKILL)",
}
DIES = """
from mpidist.transport.agreement.comparison_rounds import CarryingRounds

def die():
    {death}
if is_faulty:
    threading.Timer(0.3, die).start()
error = reduce_until_an_error()
{then}
"""
MISSES_A_CALL = """
if is_faulty:
    {death}
error = attempt("error", lambda: reduce(DEADLINE))
{then}
"""


@pytest.mark.parametrize(
    ("death", "placement", "is_caught"),
    [("os._exit", TWO, True), ("SIGTERM", UNEVEN, False), ("SIGKILL", BLOCKS, True), ("in a comparison", BLOCKS, True)],
    ids=str,
)
def test_death_is_seen_by_all_without_a_deadline(job, death, placement, is_caught):
    """Also on other nodes: those of its own tell them. Then a program ends that cannot end in peace."""
    program = DIES.format(death=DEATHS[death], then="" if is_caught else "raise error")
    ended = job(program, placement, is_blind=True)
    assert ended.status == (EXIT_CODE_AFTER_FAILURE if is_caught else 1)
    gone = f"the process of rank {placement.faulty} of {placement.size} ranks is gone"
    its_line = rf"\n  rank {placement.faulty}: its process \d+ is gone: it was killed, or ended without a word; it "
    for note in of_others(ended, "error", placement):
        assert note.kind == "PeerFailedError", note
        assert re.search(rf"^reduce .* on rank {note.rank} cannot complete: .*{gone}(.|\n)*{its_line}", note.text), note
    if is_caught:
        require_parting(ended, placement, "gone")
    else:
        assert ended.err.count("Traceback (most recent call last):") == 1
        assert gone in ended.err


CLOSES = """
strategy.reduce("SUM", 1.0)
if is_faulty:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@on(UNEVEN)
def test_death_is_seen_by_ranks_that_are_at_their_end(job, placement):
    """They wait for it in `close`, and MPI would wait for it for ever."""
    ended = job(CLOSES, placement, is_blind=True)
    assert ended.status == EXIT_CODE_AFTER_FAILURE
    said = "\n".join(line for rank in placement.others for line in ended.lines_of(rank))
    assert f"while the program ended: PeerFailedError: close() (call 4) on rank {placement.others[0]}" in said or (
        "the process of rank" in said
    )
    assert f"rank {placement.faulty}: its process" in said
    assert "Traceback" not in ended.err


def require_parting(ended, placement, state):
    """Require that the ranks that end in spite of a lost one say why the job has an exit code."""
    said = [line for rank in placement.others for line in ended.lines_of(rank)]
    said = [line for line in said if "waits up to 30 s" not in line]  # on nodes that know nothing of the lost one yet
    reason = (
        rf"this job ends with exit code {EXIT_CODE_AFTER_FAILURE}: a call failed before, and not all ranks can end: "
    )
    # A rank of another node may be gone first for its neighbours: ended by the job's end, before they are themselves.
    assert all(re.match(rf"{reason}.*rank \d+: its process \d+ is ", line) for line in said), said
    assert any(f"rank {placement.faulty}: its process" in line and f" is {state}" in line for line in said), said
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM"])
def test_launcher_ends_the_job_of_a_killed_rank(job, death):
    """It sees that, and need not be told."""
    program = DIES.format(death=DEATHS[death], then="raise error")
    ended = job(program, TWO)
    # Launchers differ, and MPICH's sometimes tells how it ended the other ranks.
    codes = {"SIGKILL": {9, 137}, "SIGTERM": {15, 143, 9}}
    assert ended.status in codes[death]


@pytest.mark.parametrize(("death", "placement"), [("SIGSTOP", TWO_APART), ("SIGKILL", UNEVEN_ALONE)], ids=str)
def test_loss_of_a_whole_node_is_seen_at_the_deadline(job, death, placement):
    """Nobody is left there who sees the process."""
    program = MISSES_A_CALL.format(death=f"os.kill(os.getpid(), signal.{death})", then="raise error")
    ended = job(program, placement, is_blind=True)
    assert ended.status == 1
    unheard = rf"\n  rank {placement.faulty}: nothing was heard from host {socket.gethostname()}"
    what = "(did not join it|makes? no progress)"
    named = rf"(: |, and )rank {placement.faulty} of {placement.size} ranks {what}(.|\n)*{unheard}"
    require_deadline(of_others(ended, "error", placement), named)
    assert ended.err.count("Traceback (most recent call last):") == 1


STOPS = MISSES_A_CALL.format(death="os.kill(os.getpid(), signal.SIGSTOP)", then="")


@on(UNEVEN)
def test_stopped_rank_is_named_at_the_deadline(job, placement):
    """And the launcher ends it with the others, stopped as it is."""
    ended = job(STOPS, placement)
    assert ended.status == EXIT_CODE_AFTER_FAILURE
    rank = placement.faulty
    stopped = rf"rank {rank} of {placement.size} ranks is stopped"
    its_line = rf"\n  rank {rank}: its process \d+ is stopped, by a signal or a debugger; it "
    require_deadline(of_others(ended, "error", placement), rf"{stopped}(.|\n)*{its_line}")
    require_parting(ended, placement, "stopped")


CONTINUES = """
def stop(until):
    is_stopped = f"grep -q 'State:.T' /proc/{os.getpid()}/status"
    subprocess.Popen(["sh", "-c", f"until {is_stopped}; do sleep 0.1; done; {until}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

if is_faulty:
    stop("sleep 0.4")
attempt("short stop", lambda: reduce(PATIENT))
if is_faulty:
    stop(f"until [ $(grep -c 'long stop' $FAULT_NOTES) -ge {len(others)} ]; do sleep 0.1; done")
attempt("long stop", lambda: reduce(DEADLINE))
strategy.reset()
attempt("long stop, after", reduce)
"""


@on(UNEVEN)
def test_rank_that_is_stopped_and_continued_takes_part_again(job, placement):
    """In time as if nothing had been; after the deadline it learns what the others did, and all may reset."""
    ended = job(CONTINUES, placement)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert {note.kind for note in ended.of("short stop").values()} == {"value"}
    rank = placement.faulty
    require_deadline(of_others(ended, "long stop", placement), rf"rank {rank} of {placement.size} ranks is stopped")
    last = ended.of("long stop")[rank]
    assert last.kind == "DeadlineExceededError"
    assert re.search(rf"on rank {rank} cannot complete: ranks? .* had given up waiting", last.text)
    require_right(ended, "long stop", placement)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@on(UNEVEN)
def test_signal_to_the_launcher_ends_all_ranks_once(job, placement, number):
    """Ctrl-C goes to all processes of the terminal."""

    def interfere(launcher, _):
        (os.killpg if number == signal.SIGINT else os.kill)(launcher.pid, number)

    ended = job("while True:\n    reduce()\n", placement, interfere=interfere)
    assert ended.status in ({130, 1} if number == signal.SIGINT else {15, 143, 1})  # launchers differ
    assert ended.err.count("Traceback") <= 1


STALLS = """
err = os.path.join(os.path.dirname(os.environ["FAULT_NOTES"]), "err")
while is_faulty and open(err).read().count("\\n") < int(os.environ["WARNINGS"]):
    time.sleep(0.1)
attempt("stall", reduce)
"""


@on(UNEVEN)
def test_late_rank_is_named_in_a_warning_where_there_is_no_deadline(job, placement):
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


def where_memory_is_small():
    """Return the words before a command that give it a /dev/shm of its own with little space."""
    unshare = [shutil.which("unshare") or "unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={SMALL} tmpfs /dev/shm"
    try:
        subprocess.run([*unshare, mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a mount namespace, and cannot have one: {error}")
    return [*unshare, f'{mount} && exec "$@"', "sh"]


@on(UNEVEN)
def test_full_shared_memory_warns_once_and_falls_back_to_mpi(job, placement):
    ended = job(NO_SPACE, placement, before=where_memory_is_small())
    assert (ended.status, ended.out) == (0, "")
    total = placement.size * (placement.size + 1) / 2
    texts = [note.text for note in ended.of("sum").values()]
    assert texts == [f"np.float64({300_000 * total})"] * placement.size
    assert {note.text for note in ended.of("left").values()} == {"[]"}
    reason = r"ranks of a node send messages .*iB cannot be had in /dev/shm \(No space left on device\); ask for less"
    assert len([line for line in ended.err.splitlines() if re.search(reason, line)]) == 1  # MPI may add its own


@on(UNEVEN)
def test_full_shared_memory_raises_if_the_variable_demands_it(job, placement):
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
    def test_killed_rank_alone_on_its_node_is_named_by_mpi(survivor, count):
        """Nobody sees its process."""
        placement = Placement((0, 0, 1), 2)
        ended = survivor(ALONE.format(count=count), placement)
        for note in of_others(ended, "error", placement):
            assert note.kind == "PeerFailedError", note
            assert "MPI has found that the process of rank 2 has failed" in note.text, note
        assert "Exception ignored in atexit" not in ended.err
        assert re.search("a call failed before, and .*rank 2", ended.err)
