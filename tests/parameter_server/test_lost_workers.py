"""Clusters that go on without workers: those that failed, in whichever way, and those whose processes are gone."""

import re

import pytest
from jobs.faults import FOUR, THREE, TWO, Placement, job
from jobs.ulfm import HAS_ULFM, survivor

__all__ = ["job", "survivor"]

pytestmark = pytest.mark.no_mpi

TWO_NODES = Placement((0, 0, 1, 1), 1)  # with two servers, one on each node

PROGRAM = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore", {arguments})
STEPS = 30

def fail():
    {fault}

def work():
    with strategy.scope():
        small = mpidist.Variable(np.zeros(4))
        large = mpidist.Variable(np.zeros(700_000, np.float32))
    ones = np.ones(700_000, np.float32)
    for step in range(STEPS):
        if rank == 1 and step == 10:
            fail()
        small.assign_add(np.ones(4))
        large.assign_add(ones)
        value = large.numpy()
        assert (value == value[0]).all(), "a snapshot"
        strategy.step_done()
    strategy.barrier()
    note("end", text=f"{{small.numpy()[0]:g}} {{ {{*np.unique(large.numpy()).tolist()}} }}")

{begin}
    if strategy.is_ps:
        strategy.serve()
        note("served")
    else:
        work()
"""
RAISES = 'raise KeyError("mine")'
EXITS = "sys.exit(3)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
QUITS = "os._exit(0)"
LATER = """
    try:
        with strategy:
            raise OSError("no file \\udcff")
    except OSError:
        raise ValueError("later") from None
"""
INTERRUPTED = """
    def interrupt(number, frame):
        raise KeyError("mine")
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.004)
    while True:
        strategy.flush()
"""


def program(fault, arguments="", begin="if True:"):
    return PROGRAM.format(fault=fault, arguments=arguments, begin=begin)


def require_rest(ended, placement, num_ps=1):
    """Require that all ranks but the faulty one came to their end, and that what it had changed is there."""
    workers = placement.size - num_ps
    value = 30 * (workers - 1) + 10
    texts = {note.text for note in ended.of("end").values()}
    assert texts == {f"{value} {{{float(value)}}}"}, ended
    assert len(ended.of("end")) == workers - 1
    assert set(ended.of("served")) == set(range(workers, placement.size))


WORKS_LONG = """
if rank == 1:
    strategy.close()
    err = os.path.join(os.path.dirname(os.environ["FAULT_NOTES"]), "err")
    while "to come there" not in open(err).read():
        time.sleep(0.1)
    time.sleep(0.5)  # in which another line might come
    note("done")
"""


@pytest.mark.long
@pytest.mark.core
def test_ended_ranks_log_once_the_rank_they_wait_for(job):
    """One worker works long after the strategy, and nothing is wrong: the others wait for ever, but not in silence."""
    ended = job(program("pass") + WORKS_LONG, THREE, MPIDIST_STALL_SECONDS="4")
    assert ended.status == 0, ended
    assert set(ended.of("done")) == {1}
    told = [line for rank in range(3) for line in ended.lines_of(rank) if "to come there" in line]
    text = "has come to its end, and has waited 4 s for rank 1 of 3 ranks to come there"
    place = r" \(rank 1: \S+program\.py:\d+ in <module>\); it waits on while their processes live"
    assert len(told) == 1, ended.err
    assert re.fullmatch(text + place, told[0]), told


@pytest.mark.core
@pytest.mark.parametrize(
    ("fault", "begin", "status", "line"),
    [
        (RAISES, "with strategy:", 1, "KeyError: 'mine'"),
        (EXITS, "if True:", 3, "SystemExit: 3"),
        (INTERRUPTED, "if True:", 1, "KeyError: 'mine'"),
    ],
    ids=["raise", "exit", "signal"],
)
def test_others_finish_without_a_worker_that_fails(job, fault, begin, status, line):
    """The traceback is shown once, and the exit status tells."""
    ended = job(program(fault, begin=begin), THREE)
    assert ended.status == status, ended
    assert ended.err.count("Traceback (most recent call last):") == 1, ended.err
    assert ended.lines_of(1)[-1] == line
    assert re.search(rf"worker 1 \(rank 1\) (has left|is lost|ended).*{line}", ended.err), ended.err
    require_rest(ended, THREE)


def test_later_failure_of_a_lost_worker_leaves_the_others_alone(job):
    """It has left with an exception that was caught; another one ends its program."""
    ended = job(program(LATER), THREE)
    assert ended.status == 1
    assert ended.lines_of(1)[-1] == "ValueError: later"
    require_rest(ended, THREE)


LATE_SERVER = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore", communication_options=PATIENT)
rules = mpidist.experimental.server_rules
rules.register("sleeps")(lambda value, gradient, memory: await_notes("late", 1))

with strategy:
    if strategy.is_ps:
        strategy.serve()
        note("served")
    else:
        with strategy.scope():
            variable = mpidist.Variable(0.0)
        if is_faulty:
            mpidist.context_stack.parts_of(strategy).peers.group.timeout_seconds = 0.5
            strategy.push(variable, 1.0, rules.Registered("sleeps"))
            try:
                variable.numpy()
            finally:
                note("late")
        await_notes("late", 1)
        variable.numpy()
        note("end")
"""


def test_others_finish_without_a_worker_that_a_server_has_not_answered_in_time(job):
    ended = job(LATE_SERVER, THREE)
    assert ended.status == 1
    assert ended.err.count("The above exception was the direct cause") == 1, ended.err
    assert "worker 1 (rank 1) is lost: mpidist.errors.UnavailableError: parameter server 0" in ended.err
    assert set(ended.of("end")) == {0}
    assert set(ended.of("served")) == {2}


@pytest.mark.parametrize(
    ("placement", "arguments", "num_ps"),
    [(FOUR, "staleness=0", 1), (TWO_NODES, "num_ps=2", 2)],
    ids=["synchronous", "two servers, two nodes"],
)
def test_others_finish_without_a_killed_worker(job, placement, arguments, num_ps):
    """Where the launcher lets them: then the last rank says at the end why the job cannot end well."""
    ended = job(program(KILLED, arguments), placement, is_blind=True)
    assert ended.status == 75, ended
    what = f"the process of rank 1 of {placement.size} ranks was lost before; all others are done"
    assert ended.err.count(what) == 1
    assert "worker 1 (rank 1) is lost: its process is gone" in ended.err
    assert "Traceback" not in ended.err
    require_rest(ended, placement, num_ps)


STAYS = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy()
if strategy.is_ps:
    attempt("serve", strategy.serve)
    await_notes("works", 0, 2)
else:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    def works():
        while True:
            variable.assign_add(1.0)
            if rank == 1 and variable.numpy() > 9:
                os.kill(os.getpid(), signal.SIGKILL)
    attempt("works", works)
os._exit(0)
"""


def require_told(ended):
    notes = ended.of("serve") | ended.of("works")
    assert {rank: note.kind for rank, note in notes.items()} == dict.fromkeys((0, 2, 3), "PeerFailedError"), ended


def test_server_that_has_given_up_is_awaited_no_longer(job):
    """Its process lives on."""
    require_told(job(STAYS, FOUR, is_blind=True))


if HAS_ULFM:

    def test_killed_worker_is_named_by_all_with_open_mpi(survivor):
        require_told(survivor(STAYS, FOUR))

    @pytest.mark.core
    @pytest.mark.parametrize("fault", [KILLED, QUITS], ids=["killed", "quits"])
    def test_open_mpi_survives_a_worker_that_is_killed(survivor, fault):
        """MPI itself says that a process has failed, and the others go on."""
        ended = survivor(program(fault), FOUR)
        assert ended.status == 75, ended
        assert "worker 1 (rank 1) is lost" in ended.err
        require_rest(ended, FOUR)


@pytest.mark.parametrize("mode", ["ignore", "abort"])
def test_failed_server_ends_the_job(job, mode):
    """Nothing goes on without it, and its traceback is the only one."""
    body = program("pass").replace('"ignore"', repr(mode)).replace("strategy.serve()", "{}['mine']")
    ended = job(body, TWO)
    assert ended.status == 1
    assert ended.lines_of(1)[-1:] == ["KeyError: 'mine'"], ended
    assert ended.err.count("Traceback (most recent call last):") == 1, ended.err
    assert not ended.of("end")


IN_A_REQUEST = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore")
if strategy.is_ps:
    strategy.serve()
else:
    with strategy.scope():
        large = mpidist.Variable(np.zeros(8 << 20, np.float32))
    delta = np.ones(8 << 20, np.float32)
    if rank == 1:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            large.assign_add(delta)
    begun = time.monotonic()
    while time.monotonic() < begun + 0.6:
        large.assign_add(delta)
        large.numpy()
    note("end")
"""


def test_worker_killed_in_a_request_blocks_no_server(job):
    """The worker is killed while it sends a large array."""
    ended = job(IN_A_REQUEST, THREE, is_blind=True)
    assert ended.status == 75, ended
    assert set(ended.of("end")) == {0}
    assert "worker 1 (rank 1) is lost" in ended.err


PUSHES = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy()
if strategy.is_ps:
    attempt("serve", strategy.serve)
else:
    with strategy.scope():
        large, small = mpidist.Variable(np.zeros(4 << 20)), mpidist.Variable(np.zeros(40_000))
    delta = np.ones(4 << 20)
    def pushes():
        note("pushing")
        while True:
            large.assign_add(delta)
            small.assign_add(delta[:40_000])
            value = large.numpy()
            assert (value == value[0]).all(), value
    if is_faulty:
        def die():
            await_notes("pushing", *range(size - 1))
            time.sleep({seconds})
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=die).start()
    attempt("pushes", pushes)
os._exit(0)
"""


@pytest.mark.core
@pytest.mark.parametrize(("placement", "seconds"), [(TWO._replace(faulty=0), 0.2), (THREE, 0.27)])
def test_worker_killed_in_a_push_is_named(job, placement, seconds):
    """By its server, also where that waits for it alone, and by the other worker."""
    ended = job(PUSHES.format(seconds=seconds), placement, is_blind=True)
    server = len(placement.nodes) - 1
    note = ended.of("serve")[server]
    assert note.kind == "PeerFailedError"
    assert f"the process of rank {placement.faulty} of" in note.text
    for rank, other in ended.of("pushes").items():
        assert rank != placement.faulty
        assert other.kind in ("PeerFailedError", "UnavailableError"), other


SERVER = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy()
def die():
    await_notes("changing", 0)
    os.kill(os.getpid(), signal.SIGKILL)
mpidist.experimental.server_rules.register("dies")(lambda value, gradient, memory: die())
if strategy.is_ps:
    strategy.serve()
with strategy.scope():
    variable = mpidist.Variable(0.0, name="total")
strategy.push(variable, 1.0, mpidist.experimental.server_rules.Registered("dies"))
def changes():
    for _ in range(20):
        variable.assign_add(1.0)
    note("changing")
def program():
    changes()
    {call}
attempt("changes", program)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["variable.numpy()", "while True: changes()"])
def test_changes_under_way_to_a_server_that_is_killed_are_an_error(job, call):
    """Of the next call that waits; the first change is named."""
    ended = job(SERVER.format(call=call), TWO._replace(faulty=1), is_blind=True)
    note = ended.of("changes")[0]
    assert note.kind == "UnavailableError", ended
    assert note.text.startswith("parameter server 0 (rank 1) is lost"), note
    assert "change of 'total'" in note.text, note
