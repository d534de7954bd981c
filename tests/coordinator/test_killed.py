"""Coordinators whose workers or servers are killed in the middle of a call: pushes once, and nobody waits for ever."""

import re

import pytest
from jobs.faults import FOUR, THREE, job
from jobs.ulfm import HAS_ULFM, survivor

__all__ = ["job", "survivor"]

pytestmark = pytest.mark.no_mpi

CALLS = 30
REFUSED = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore")

@mpidist.experimental.server_rules.register("refuse")
def refuse(value, gradient, memory):
    if gradient > 1:
        raise ValueError("no such gradient")
    value += gradient

@mpidist.experimental.coordinator.register("push")
def push():
    if rank != 1:
        await_notes("fault", 1)  # so that worker 1 is the first to make the call
    strategy.push([added, refused], [1.0, 2.0], mpidist.experimental.server_rules.Registered("refuse"))
    added.assign_add(1.0)
    if rank == 1:
        attempt("flush", strategy.flush)
        note("fault")
        os.kill(os.getpid(), signal.SIGKILL)

if strategy.is_ps:
    strategy.serve()
else:
    with strategy.scope():
        added, refused = mpidist.Variable(0.0), mpidist.Variable(0.0)
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
    if strategy.is_chief:
        coordinator.schedule(push)
        attempt("join", coordinator.join)
        note("sums", text=f"{added.numpy():g} {refused.numpy():g}")
    else:
        coordinator.serve()
strategy.close()
"""
WORKER = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore")
made = 0

class Leaves(BaseException):
    "What ends a worker, and not its function alone."

@mpidist.experimental.coordinator.register("push")
def push(number):
    global made
    made += 1
    small.assign_add([1.0, number])
    strategy.push([small, large], [np.array([10.0, 0.0]), 10.0 * np.ones(large.shape)])
    if rank == 1 and made == 2:
        {before}
        note("fault")
        {fault}
    if rank != 1:
        await_notes("fault", 1)  # so that worker 1 makes two calls, however slow it is
    small.scatter_add(mpidist.IndexedSlices([100.0], [0]))
    strategy.push(large, 100.0 * np.ones(large.shape), mpidist.experimental.server_rules.SGD(-1.0))
    return number

if strategy.is_ps:
    strategy.serve()
else:
    with strategy.scope():
        small, large = mpidist.Variable(np.zeros(2)), mpidist.Variable(np.zeros(300_000))
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
    if strategy.is_chief:
        values = [coordinator.schedule(push, args=(number,)) for number in range({calls})]
        coordinator.join()
        assert coordinator.fetch(values) == list(range({calls}))
        note("sums", text=f"{{small.numpy().tolist()}} {{set(large.numpy().tolist())}}")
    else:
        coordinator.serve()
strategy.close()
note("end")
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
# What the worker has made of its pushes, how it ends, and the exit status of the job.
ENDS = {
    "killed, made": ("strategy.flush()", KILLED, 75),
    "killed, under way": ("pass", KILLED, 75),
    "left": ("strategy.flush()", "raise Leaves", 1),
}
SERVER = """
import itertools
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(num_ps={num_ps}, on_worker_lost={mode!r})

@mpidist.experimental.coordinator.register("add")
def add():
    for variable in variables:
        variable.assign_add(1.0)
        variable.read_value()

def ask():
    for number in itertools.count():
        coordinator.schedule(add)
        coordinator.join()
        if not number:
            note("joined")

def fail():
    await_notes("joined", 0)
    os.kill(os.getpid(), signal.SIGKILL)

if strategy.is_ps:
    if is_faulty:
        threading.Thread(target=fail).start()
    attempt("served", strategy.serve)
else:
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(2)) for _ in range(2)]
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
    attempt("asked" if strategy.is_chief else "worked", ask if strategy.is_chief else coordinator.serve)
"""


def program(end):
    before, fault, _ = ENDS[end]
    return WORKER.format(before=before, fault=fault, calls=CALLS)


def require_pushes_once(ended, status=75):
    assert ended.status == status, ended
    assert set(ended.of("fault")) == {1}
    assert ended.of("sums")[0].text == f"{[111.0 * CALLS, float(sum(range(CALLS)))]} {{{110.0 * CALLS}}}"
    assert set(ended.of("end")) == {0, 2, 3}


@pytest.mark.parametrize("end", [*list(ENDS)[:2], pytest.param("left", marks=pytest.mark.core)])
def test_pushes_of_a_worker_that_is_killed_or_leaves_are_made_once(job, end):
    """Those that the servers have made, and those that are under way; its calls are made again."""
    require_pushes_once(job(program(end), FOUR, is_blind=end != "left"), ENDS[end][2])


def test_push_that_fails_is_an_error_also_of_a_repeated_call(job):
    """The worker whose push it was is killed before it reports the error."""
    ended = job(REFUSED, FOUR, is_blind=True)
    assert "no such gradient" in ended.of("flush")[1].text, ended
    assert "no such gradient" in ended.of("join")[0].text, ended
    assert ended.of("sums")[0].text == "2 0"


@pytest.mark.parametrize(
    ("placement", "num_ps", "mode"),
    [(THREE._replace(faulty=2), 1, "ignore"), (FOUR._replace(faulty=3), 2, "abort")],
)
def test_killed_server_raises_on_the_chief_and_ends_workers(job, placement, num_ps, mode):
    ended = job(SERVER.format(num_ps=num_ps, mode=mode), placement, is_blind=True)
    assert ended.status != 0, ended
    asked, worked = ended.of("asked")[0], ended.of("worked")
    assert asked.kind in ("UnavailableError", "PeerFailedError"), ended
    texts = [asked.text, *(note.text for note in worked.values())]
    gone = rf"the process of rank {placement.faulty} (of \d ranks )?is gone"
    assert all(re.search(gone, text) for text in texts), texts
    assert set(worked) == set(range(1, placement.size - num_ps)), ended


if HAS_ULFM:

    @pytest.mark.core
    def test_pushes_are_made_once_after_mpi_reports_a_lost_worker(survivor):
        require_pushes_once(survivor(program("killed, made"), FOUR))
