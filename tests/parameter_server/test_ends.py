"""How clusters end: in order, early, by an exception, and by the loss of a worker or of a server."""

from __future__ import annotations

import re

import pytest
from jobs.faults import FOUR, THREE, TWO, Ended, Job, Placement, job

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

SERVER_IS_FAULTY = Placement((0, 0, 0), 2)
SERVER_IS_APART = Placement((0, 0, 1), 2)

CLUSTER = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy({arguments})
"""
VARIABLE = """
if not strategy.is_ps:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(4))
"""
READS = """
def read():
    variable.assign_add(1.0)
    variable.numpy()

def reads():
    read()
    note("reading")
    while True:
        read()
"""


def cluster(body: str, arguments: str = "") -> str:
    return CLUSTER.format(arguments=arguments) + VARIABLE + READS + body


def tracebacks(ended: Ended) -> int:
    return ended.err.count("Traceback (most recent call last):")


EARLY = """
if strategy.is_ps:
    strategy.serve()
else:
    for _ in range(20 * rank):
        variable.assign_add(1.0)
        time.sleep(0.002)
{close}
note("end")
"""


@pytest.mark.core
@pytest.mark.parametrize("close", ["", "strategy.close()"], ids=["left to the program's end", "closed"])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_workers_may_end_early(job: Job, close: str, num_ps: int) -> None:
    ended = job(cluster(EARLY.format(close=close), f"num_ps={num_ps}"), FOUR)
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.of("end")) == 4


NEVER_SERVES = """
if not strategy.is_ps:
    variable.assign_add(1.0)
    strategy.barrier()
    note("end", text=str(variable.numpy()[0]))
"""


def test_server_whose_program_ends_serves_until_workers_are_done(job: Job) -> None:
    ended = job(cluster(NEVER_SERVES), THREE)
    assert (ended.status, ended.err) == (0, "")
    assert [note.text for note in ended.of("end").values()] == ["2.0", "2.0"]


LATE = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy()
if rank == {late}:
    time.sleep(0.7)
if strategy.is_ps:
    strategy.serve()
else:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(4))
    variable.assign_add(1.0)
    strategy.barrier()
    assert variable.numpy()[0] == 2
"""


@pytest.mark.parametrize("late", [0, 2])
def test_late_ranks_are_awaited(job: Job, late: int) -> None:
    ended = job(LATE.format(late=late), THREE)
    assert (ended.status, ended.err) == (0, "")


RAISES = """
try:
    with strategy:
        if strategy.is_ps:
            strategy.serve()
            note("served")
        elif is_faulty:
            time.sleep(0.2)
            {{}}["mine"]
        else:
            {others}
            note("end", text=str(variable.numpy()[1]))
except KeyError:
    {caught}
"""


@pytest.mark.core
@pytest.mark.parametrize("body", ["with", "bare"])
def test_exception_of_a_worker_is_shown_once_and_ends_the_job(job: Job, body: str) -> None:
    program = RAISES.format(others="reads()", caught="raise")
    if body == "bare":
        program = program.replace("with strategy:", "if True:")
    ended = job(cluster(program), THREE)
    assert ended.status == 1
    assert tracebacks(ended) == 1, ended.err
    assert ended.lines_of(1)[-1:] == ["KeyError: 'mine'"], ended.err
    for other in (0, 2):
        text = " ".join(ended.lines_of(other))
        assert re.match(r"PeerFailedError: .*rank 1 (ended|left because of an exception): KeyError: 'mine'", text), text


@pytest.mark.core
def test_others_go_on_without_a_worker_that_said_why_it_left(job: Job) -> None:
    """Its traceback is shown once, and the job's exit status tells of it; the server says it, too."""
    others = "time.sleep(0.5); [variable.assign_add(1.0) for _ in range(10)]; strategy.barrier()"
    program = RAISES.format(others=others, caught="raise")
    ended = job(cluster(program, "on_worker_lost='ignore'"), THREE)
    assert ended.status == 1
    assert tracebacks(ended) == 1, ended.err
    assert ended.lines_of(1)[-1] == "KeyError: 'mine'"
    assert ended.of("end")[0].text == "10.0"
    assert set(ended.of("served")) == {2}
    assert "worker 1 (rank 1) has left: KeyError: 'mine'" in ended.err


def test_a_worker_that_left_may_go_on_alone(job: Job) -> None:
    program = RAISES.format(others="time.sleep(0.3)", caught="note('alone')")
    ended = job(cluster(program, "on_worker_lost='ignore'"), THREE)
    assert ended.status == 0, ended.err
    assert set(ended.of("alone")) == {1}
    assert set(ended.of("served")) == {2}


IN_SERVE = """
if strategy.is_ps:
    attempt("serve", strategy.serve)
else:
    try:
        with strategy:
            if is_faulty:
                {}["mine"]
            attempt("reads", reads)
    except KeyError:
        pass
await_notes("serve", 2)  # a launcher may end the others when one has ended
await_notes("reads", 0)
os._exit(0)
"""


def test_exception_that_is_caught_ends_the_waits_of_the_others(job: Job) -> None:
    ended = job(cluster(IN_SERVE), THREE)
    text = "rank 1 left because of an exception: KeyError: 'mine'"
    for what, rank in (("serve", 2), ("reads", 0)):
        note = ended.of(what)[rank]
        assert (note.kind, text in note.text) == ("PeerFailedError", True), note


KILLED = """
if strategy.is_ps:
    def die():
        await_notes("reading", 0, 1)
        {before}
        os.kill(os.getpid(), signal.{signal})
    threading.Thread(target=die).start()
    strategy.serve()
else:
    attempt("first", reads)
    attempt("second", variable.numpy)
    attempt("reset", strategy.reset)
    attempt("close", strategy.close)
    os._exit(0)
"""


@pytest.mark.core
def test_a_server_that_is_killed_is_an_error_of_its_workers(job: Job) -> None:
    ended = job(cluster(KILLED.format(before="", signal="SIGKILL")), SERVER_IS_FAULTY, is_blind=True)
    for rank in (0, 1):
        first, second = ended.of("first")[rank], ended.of("second")[rank]
        assert first.kind == second.kind == "UnavailableError", (first, second)
        assert first.text.startswith("parameter server 0 (rank 2) is lost, with the variables on it: ")
        reset = ended.of("reset")[rank]
        assert reset.kind == "UnavailableError", reset
        assert re.match(r"reset\(\) cannot bring back .* start it again, from a checkpoint", reset.text)
        assert ended.of("close")[rank].kind == "value"


ONE_OF_TWO_SERVERS = """
def die():
    await_notes("reading", 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with strategy:
        if strategy.is_ps:
            if is_faulty:
                threading.Thread(target=die).start()
            attempt("serve", strategy.serve)
        else:
            attempt("reads", reads)
            raise KeyError("mine")
except KeyError:
    note("caught")
time.sleep(1)
os._exit(0)
"""


@pytest.mark.long
def test_workers_that_have_caught_the_loss_of_a_server_end_the_other_servers(job: Job) -> None:
    """Of which none waits for the lost one, and none would learn of it."""
    ended = job(cluster(ONE_OF_TWO_SERVERS, "num_ps=2"), FOUR._replace(faulty=2), is_blind=True)
    assert {note.kind for note in ended.of("reads").values()} == {"UnavailableError"}, ended
    served = ended.of("serve")[3]
    assert served.kind == "PeerFailedError", served


@pytest.mark.long
@pytest.mark.parametrize(("placement", "signal"), [(SERVER_IS_APART, "SIGKILL"), (SERVER_IS_FAULTY, "SIGSTOP")])
def test_a_server_that_does_not_answer_is_an_error_at_the_deadline(job: Job, placement: Placement, signal: str) -> None:
    """Of another node nobody sees the process; and a process that is stopped may go on."""
    # The launcher must not wait for one that is stopped.
    before = "" if signal == "SIGKILL" else 'subprocess.Popen(["sh", "-c", KILL])'
    program = KILLED.format(before=before, signal=signal)
    kill = "until [ $(grep -c first $FAULT_NOTES) -ge 2 ]; do sleep 0.1; done; kill -KILL {os.getpid()}"
    shorter = (
        "mpidist.context_stack.parts_of(strategy).service.group.timeout_seconds = 3"  # once all have come together
    )
    program = f'KILL = f"{kill}"' + cluster(program).replace('note("reading")', f'{shorter}; note("reading")')
    ended = job(program, placement, is_blind=True, MPIDIST_TIMEOUT_SECONDS="600")
    for rank in (0, 1):
        first = ended.of("first")[rank]
        assert first.kind == "UnavailableError", first
        assert first.text.startswith("parameter server 0 (rank 2) is lost")


WORKER_DIES = """
if strategy.is_ps:
    attempt("serve", strategy.serve)
elif is_faulty:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    reads()
else:
    attempt("reads", reads)
os._exit(0)
"""


def test_a_worker_that_is_killed_is_named(job: Job) -> None:
    """Case X43. Where the server waits for it alone."""
    ended = job(cluster(WORKER_DIES), TWO._replace(faulty=0), is_blind=True)
    note = ended.of("serve")[1]
    assert note.kind == "PeerFailedError"
    assert "the process of rank 0 of 2 ranks is gone" in note.text


KILLED_AT_THE_END = """
if not strategy.is_ps:
    variable.assign_add(1.0)
if is_faulty:
    def die(group):
        time.sleep(0.2)  # all others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    type(mpidist.context_stack.parts_of(strategy).service.group).free = die
attempt("close", strategy.close)
os._exit(0)
"""


@pytest.mark.long
def test_a_worker_that_is_killed_as_the_cluster_ends_is_noticed_by_all(job: Job) -> None:
    """Its server has served all, and waits for no worker any more."""
    ended = job(cluster(KILLED_AT_THE_END), THREE, is_blind=True)
    for rank in (0, 2):
        note = ended.of("close")[rank]
        assert note.kind == "PeerFailedError", note
        also_gone = r"process of rank 1|processes of ranks (0-1|1-2)"  # a survivor may be the first to end, too
        assert re.search(rf"the ({also_gone}) of 3 ranks (is|are) gone", note.text), note


LOST_AMONG_TWO = """
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if strategy.is_ps:
    attempt("serve", strategy.serve)
else:
    time.sleep(0.3)
    with strategy.scope():
        attempt("all", lambda: [mpidist.Variable(np.zeros(2)) for _ in range(2)])
    attempt("close", strategy.close)
os._exit(0)
"""


@pytest.mark.long
def test_the_other_server_ends_when_its_workers_have_lost_one(job: Job) -> None:
    ended = job(cluster(LOST_AMONG_TWO, "num_ps=2"), FOUR, is_blind=True)
    assert ended.of("all")[0].kind == "UnavailableError", ended.notes
    assert "parameter server 1 (rank 3)" in ended.of("all")[0].text
    assert ended.of("serve")[2].kind in ("value", "PeerFailedError")


TOGETHER = """
with strategy:
    if strategy.is_ps:
        strategy.serve()
    else:
        with strategy.scope():
            mpidist.Variable(float(rank), name=f"of {rank}")
"""


def test_an_error_of_all_workers_is_shown_once(job: Job) -> None:
    ended = job(cluster(TOGETHER), THREE)
    assert ended.status == 1
    assert tracebacks(ended) == 1, ended.err
    assert "InvalidArgumentError: Variable: the workers did not make the same calls" in ended.err
