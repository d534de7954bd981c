"""How clusters end: in order, early, by an exception, and by the loss of a worker or of a server."""

import re

import pytest
from jobs.faults import FOUR, THREE, Placement, job

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


def cluster(body, arguments=""):
    return CLUSTER.format(arguments=arguments) + VARIABLE + READS + body


def tracebacks(ended):
    return ended.err.count("Traceback (most recent call last):")


LATE = "if rank in (0, 3):\n    time.sleep(0.5)\n"
EARLY = """
if rank == 2:
    strategy.serve()  # the program of the other server ends, and it serves all the same
if rank < 2:
    for _ in range(20 * rank):
        variable.assign_add(1.0)
        time.sleep(0.002)
note("end")
"""


@pytest.mark.core
def test_cluster_waits_for_late_ranks_and_lets_workers_end_early(job):
    ended = job(CLUSTER.format(arguments="num_ps=2") + LATE + VARIABLE + EARLY, FOUR)
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.of("end")) == 4


RAISES = """
try:
    with strategy:
        if strategy.is_ps:
            strategy.serve()
            note("served")
        elif is_faulty:
            time.sleep(0.2)
            {}["mine"]
        else:
            reads()
except ZeroDivisionError:
    pass
"""


@pytest.mark.core
@pytest.mark.parametrize("body", ["with", "bare"])
def test_exception_of_a_worker_is_shown_once_and_ends_the_job(job, body):
    ended = job(cluster(RAISES if body == "with" else RAISES.replace("with strategy:", "if True:")), THREE)
    assert ended.status == 1
    assert tracebacks(ended) == 1, ended.err
    assert ended.lines_of(1)[-1:] == ["KeyError: 'mine'"], ended.err
    for other in (0, 2):
        text = " ".join(ended.lines_of(other))
        assert re.match(r"PeerFailedError: .*rank 1 (ended|left because of an exception): KeyError: 'mine'", text), text


BROKEN_OFF = """
if strategy.is_ps:
    def interrupt():
        await_notes("reading", 0, 1)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        strategy.serve()
    except KeyboardInterrupt:
        note("caught")
    strategy.close()
else:
    reads()
"""


@pytest.mark.core
def test_server_serves_no_more_after_an_interrupted_serve(job):
    ended = job(cluster(BROKEN_OFF), THREE)
    assert ended.status == 1
    text = r"PeerFailedError: .*rank 2 left because of an exception: its serve\(\) was broken off"
    assert re.search(text, ended.err), ended.err


FORKED = """
if strategy.is_ps:
    strategy.serve()
elif rank == 0:
    child = os.fork()
    if child == 0:
        for call in (lambda: variable.assign_add(1.0), variable.numpy):
            try:
                call()
            except RuntimeError as error:
                note("refused" if "in a forked process" in str(error) else "other")
        os._exit(0)
    os.waitpid(child, 0)
    assert not variable.numpy().any()
"""


def test_forked_child_makes_no_request_of_its_parent(job):
    ended = job(cluster(FORKED), THREE)
    assert (ended.status, [note.what for note in ended.notes][3:]) == (0, ["refused"] * 2), ended.err


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
def test_killed_server_raises_on_its_workers(job):
    ended = job(cluster(KILLED.format(before="", signal="SIGKILL")), SERVER_IS_FAULTY, is_blind=True)
    for rank in (0, 1):
        first, second = ended.of("first")[rank], ended.of("second")[rank]
        assert first.kind == second.kind == "UnavailableError", (first, second)
        assert first.text.startswith("parameter server 0 (rank 2) is lost, with the variables on it: ")
        reset = ended.of("reset")[rank]
        assert reset.kind == "UnavailableError", reset
        assert re.match(r"reset\(\) cannot restore .* start it again, from a checkpoint", reset.text)
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
def test_workers_that_have_caught_the_loss_of_a_server_end_the_other_servers(job):
    """Of which none waits for the lost one, and none would learn of it."""
    ended = job(cluster(ONE_OF_TWO_SERVERS, "num_ps=2"), FOUR._replace(faulty=2), is_blind=True)
    assert {note.kind for note in ended.of("reads").values()} == {"UnavailableError"}, ended
    served = ended.of("serve")[3]
    assert served.kind == "PeerFailedError", served


@pytest.mark.long
@pytest.mark.parametrize(("placement", "signal"), [(SERVER_IS_APART, "SIGKILL"), (SERVER_IS_FAULTY, "SIGSTOP")])
def test_silent_server_raises_at_the_deadline(job, placement, signal):
    """Of another node nobody sees the process; and a process that is stopped may go on."""
    # The launcher must not wait for one that is stopped.
    before = "" if signal == "SIGKILL" else 'subprocess.Popen(["sh", "-c", KILL])'
    program = KILLED.format(before=before, signal=signal)
    kill = "until [ $(grep -c first $FAULT_NOTES) -ge 2 ]; do sleep 0.1; done; kill -KILL {os.getpid()}"
    shorter = "mpidist.context_stack.parts_of(strategy).peers.group.timeout_seconds = 3"  # once all have come together
    program = f'KILL = f"{kill}"' + cluster(program).replace('note("reading")', f'{shorter}; note("reading")')
    ended = job(program, placement, is_blind=True, MPIDIST_TIMEOUT_SECONDS="600")
    for rank in (0, 1):
        first = ended.of("first")[rank]
        assert first.kind == "UnavailableError", first
        assert first.text.startswith("parameter server 0 (rank 2) is lost")


KILLED_AT_THE_END = """
if not strategy.is_ps:
    variable.assign_add(1.0)
if is_faulty:
    def die(group):
        time.sleep(0.2)  # all others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    type(mpidist.context_stack.parts_of(strategy).peers.group).free = die
attempt("close", strategy.close)
os._exit(0)
"""


@pytest.mark.long
def test_worker_killed_at_the_end_raises_on_all(job):
    """Its server has served all, and waits for no worker any more."""
    ended = job(cluster(KILLED_AT_THE_END), THREE, is_blind=True)
    for rank in (0, 2):
        note = ended.of("close")[rank]
        assert note.kind == "PeerFailedError", note
        also_gone = r"process of rank 1|processes of ranks (0-1|1-2)"  # a survivor may be the first to end, too
        assert re.search(rf"the ({also_gone}) of 3 ranks (is|are) gone", note.text), note


TOGETHER = """
with strategy:
    if strategy.is_ps:
        strategy.serve()
    else:
        with strategy.scope():
            mpidist.Variable(float(rank), name=f"of {rank}")
"""


def test_error_of_all_workers_is_printed_once(job):
    ended = job(cluster(TOGETHER), THREE)
    assert ended.status == 1
    assert tracebacks(ended) == 1, ended.err
    assert "InvalidArgumentError: Variable: the workers did not make the same calls" in ended.err
