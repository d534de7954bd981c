"""How jobs end, or do not start: each soon, with a code that is not 0 if something failed, and says why."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs.failing import HEAD, LONG_SECONDS, PROJECT, SIGNS, end_of
from mpi4py import MPI
from mpi_session import clean_environment
from mpi_session.launch import OPEN_MPI, Launcher

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]


IS_MPICH = "MPICH" in MPI.Get_library_version()


IMPORTS = HEAD.partition("strategy =")[0]
DEADLINE = {"MPIDIST_TIMEOUT_SECONDS": "0.5"}
LATER = """
from mpidist.transport.failures import job_abort
job_abort._ACKNOWLEDGE_SECONDS = 60.0
strategy.reduce("SUM", 1.0)
if rank == 0:
    {}
time.sleep(2)
reduce_for_ever()
"""
MUTE = """
class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")
if rank == 1:
    raise Mute
reduce_for_ever()
"""
IN_DELETED_FOLDER = """
import tempfile
from mpi4py import MPI
folder = tempfile.mkdtemp()
os.chdir(folder)
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.topology.rank
os.rmdir(folder)
if rank == 1:
    await_signs("rank 0")
try:
    strategy.reduce("SUM", 1.0, options=mpidist.CommunicationOptions(timeout_seconds=0.5))
except mpidist.errors.DeadlineExceededError as error:
    sys.stdout.write(f"rank {rank} is told\\n")
    sys.stdout.flush()
leave_sign(f"rank {rank}")
await_signs("rank 0")
raise KeyError("mine")
"""
IN_A_THREAD = f"""
strategy.reduce("SUM", 1.0)
def train():
    strategy.reduce("SUM", 1.0)
    if rank == 1:
        raise KeyError("mine")
    reduce_for_ever()
thread = threading.Thread(target=train)
thread.start()
thread.join()
time.sleep({LONG_SECONDS})
"""
LEAVES_IN_A_THREAD = """
def train():
    with mpidist.MultiWorkerMirroredStrategy() as own:
        own.reduce("SUM", {})
        if rank == 1:
            raise KeyError("mine")
        own.reduce("SUM", 1.0)
thread = threading.Thread(target=train)
thread.start()
thread.join()
strategy.reduce("SUM", 1.0)
"""
IN_A_DAEMON = f"""
from mpidist.transport.group import thread_guard
def train():
    while rank == 0 or {{}}:
        strategy.reduce("SUM", 1.0)
thread_guard._END_SECONDS = {{}}
threading.Thread(target=train, daemon=True).start()
time.sleep(0.5 + (rank * {LONG_SECONDS} if thread_guard._END_SECONDS == 1 else 0))
"""
STORM = """
def storm():
    for _ in range(200):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.002)
threading.Thread(target=storm, daemon=True).start()
end = time.monotonic() + 0.8
while strategy.reduce("MIN", end - time.monotonic()) > 0:
    pass
strategy.close()
"""
FUNCTION = """
from mpidist.experimental import ParameterServerStrategy, coordinator
@coordinator.register("fail")
def fail():
    raise KeyError("mine")
strategy = ParameterServerStrategy()
if strategy.is_ps:
    strategy.serve()
else:
    coordinator.ClusterCoordinator(strategy).schedule(fail)
"""
BUILD = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
if rank == 1:
    await_signs({})
for _ in range(3):
    try:
        strategy = mpidist.MultiWorkerMirroredStrategy()
    except (mpidist.errors.DeadlineExceededError, mpidist.errors.UnavailableError) as error:
        sys.stdout.write(f"rank {{rank}}: {{type(error).__name__}} {{error}}\\n")
        sys.stdout.flush()
leave_sign(f"rank {{rank}} has tried")
"""
# A signal handler raises on rank 0 alone, once it waits.
RING = """
def ring(_, frame):
    while frame and not frame.f_code.co_filename.endswith("waiting.py"):
        frame = frame.f_back
    if frame:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise InterruptedError("alarm")
signal.signal(signal.SIGALRM, ring)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)
    try:
        {call}
    except InterruptedError:
        leave_sign("interrupted")
else:
    await_signs("interrupted")
"""
AT_THE_END = RING.replace("raise InterruptedError(", "leave_sign('interrupted')\n        raise {error}(").format_map
STEP = """
import ctypes
def step(number):
    if rank == 1 and number == 2:
        {what}
    mpidist.get_replica_context().all_reduce("sum", 1.0)
with strategy.scope():
    for number in range(4):
        strategy.run(step, args=(number,))
"""
LAUNCHED = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
"""
BUILD_AND_ADD = """
strategy = mpidist.MultiWorkerMirroredStrategy()
sys.stdout.write(f"sum {strategy.reduce('sum', 1.0)}\\n")
strategy.close()
"""
# Rank 1 fails; rank 2 does not come for long.
EARLY = f"""{LAUNCHED}import mpidist
if rank == 1:
    time.sleep(0.5)
    FAULT
if rank == 2:
    time.sleep({LONG_SECONDS})
{BUILD_AND_ADD}"""


class End(NamedTuple):
    """A program, and how the job ends."""

    program: str
    status: int | None  # `None` is any but 0
    said: dict[str, int | None]  # how often the job writes what matches; `None` is at least once
    ranks: int = 2
    head: str = HEAD
    variables: dict[str, str] | None = None  # `{folder}` is one of the test's own


ENDS = {
    "exit with a code on all ranks": End("strategy.reduce('SUM', 1.0)\nsys.exit(3)", 3, {"SystemExit: 3": 1}),
    "exit with a code that is set later": End(
        "strategy.reduce('SUM', 1.0)\nend = SystemExit()\nend.code = 3\nraise end", 3, {"SystemExit: 3": 1}
    ),
    # An end without an error is one for those who still reduce.
    "exit where others reduce": End(
        "strategy.reduce('SUM', 1.0)\nif rank == 1:\n    sys.exit()\nreduce_for_ever()", None,
        {"PeerFailedError.*rank 1 ended the program while ranks 0, 2 called reduce": None}, ranks=3,
    ),
    "exception before others call": End(
        LATER.format("raise KeyError('mine')"), None, {r"\[rank 1 on .*PeerFailedError.*rank 0 ended": None}
    ),
    "exit before others call": End(
        LATER.format("sys.exit(3)"), None, {r"\[rank 1 on .*PeerFailedError.*rank 0 ended": None}
    ),
    # The other rank leaves the inner strategy by an error that follows this one, which is the whole error.
    "exception where two strategies are open": End(
        "with mpidist.MultiWorkerMirroredStrategy():\n    if rank == 1:\n        raise KeyError('mine')\n"
        "    strategy.reduce('SUM', 1.0)", 1, {r"\[rank 1 on .*\] KeyError: 'mine'$": 1, "Traceback": 1},
    ),
    "error of a started call that nobody has waited for": End(
        "strategy.run(lambda: mpidist.get_replica_context().start_all_reduce('SUM', [1.0] * (1 + rank)))", 1,
        {"InvalidArgumentError: start_all_reduce .* did not pass the same": 1},
    ),
    "program that exec has replaced": End(
        "if rank == 1:\n    os.execv(sys.executable, [sys.executable, *sys.argv])\nreduce_for_ever()", None,
        {"TopologyError: process .* whose program was replaced by os.exec after it had started MPI": 1},
    ),
    "MPI that the program has to start, and does not": End(
        "import mpi4py\nmpi4py.rc.initialize = False\nimport mpidist\nmpidist.MultiWorkerMirroredStrategy()", 1,
        {"RuntimeError: MPI is not started, and mpi4py.rc.initialize is False": None}, head="",
    ),
    "strategy after the end of MPI": End(
        "from mpi4py import MPI\nMPI.Finalize()\nimport mpidist\nmpidist.MultiWorkerMirroredStrategy()", 1,
        {"RuntimeError: a new strategy after MPI.Finalize": None}, head="",
    ),
    # Nothing has to be ended.
    "one rank": End(
        "print(strategy.reduce('SUM', 1.0), flush=True)\nraise KeyError('mine')", None,
        {r"\A1\.0\n": 1, r"^1\.0$": 1, "KeyError: 'mine'": None}, ranks=1,
    ),
    "exception that cannot say what it is": End(
        MUTE, None, {r"\[rank 1 on .*\] Mute: <(exception str|unprintable)[^>]*>$": 1, "Error in sys.excepthook": 0}
    ),
    "streams that the program has closed": End(
        "sys.stdout.close()\nsys.stderr = None\nif rank == 1:\n    raise KeyError('mine')\nreduce_for_ever()", None,
        {r"\[rank 1 on .*\] KeyError: 'mine'$": 1},
    ),
    "deleted folder": End(
        IN_DELETED_FOLDER, None, {"rank 0 is told": None, "KeyError: 'mine'": None, "FileNotFoundError": 0},
        head=IMPORTS + SIGNS, variables={"MPIDIST_FLIGHT_DIR": ""},
    ),
    "exception in the thread that makes the calls": End(
        IN_A_THREAD, None, {r"\[rank 1 on .*\] KeyError: 'mine'$": 1, "Traceback": 1}, ranks=3
    ),
    "exception that leaves a strategy in its thread": End(
        LEAVES_IN_A_THREAD.format(1.0), 1, {r"\[rank 1 on .*\] KeyError: 'mine'$": 1, "Traceback": 1}, ranks=3
    ),
    "error of all ranks that leaves a strategy in its thread": End(
        LEAVES_IN_A_THREAD.format("[1.0] * rank"), 1, {r"InvalidArgumentError: reduce \(call 2\)": 1, "Traceback": 1}
    ),
    "exit in the thread that makes the calls": End(
        IN_A_THREAD.replace('raise KeyError("mine")', "sys.exit(3)"), 3, {r"\[rank 1 on .*\] SystemExit: 3$": 1}
    ),
    "end where a thread still makes calls": End(
        IN_A_DAEMON.format(True, 60), 1, {r"RuntimeError: reduce in thread .* after the program has ended: join": None}
    ),
    "end where a thread waits in a call": End(
        IN_A_DAEMON.format(False, 1), 75, {"75: thread .* still makes this strategy's calls: join it before": 1}
    ),
    "many signals at once": End(STORM, 0, {}, variables={"MPIDIST_FLIGHT_DIR": "{folder}"}),
    # Also one that is tried again, and for the rank that comes too late.
    "strategy that a rank builds too late": End(
        BUILD.format("'rank 0 has tried'"), None,
        {
            "rank 0: DeadlineExceededError building a strategy on rank 0 has waited": None,
            "rank 0: UnavailableError not all ranks came to build a strategy before": 2,
        },
        head=IMPORTS + SIGNS, variables=DEADLINE,
    ),
    "strategy that a rank never builds": End(
        BUILD.format("'never'"), None,
        {"this job ends with exit code 75: not all ranks came to build a strategy": None},
        head=IMPORTS + SIGNS, variables=DEADLINE,
    ),
    "strategy whose building is interrupted": End(
        RING.format(call="mpidist.MultiWorkerMirroredStrategy()") + "mpidist.MultiWorkerMirroredStrategy()", 1,
        {"UnavailableError: building a strategy was interrupted by InterruptedError before": 1}, head=HEAD + SIGNS,
    ),
    "close that is interrupted": End(
        RING.format(call="strategy.close()")
        + "try:\n    strategy.close()\nexcept mpidist.errors.PeerFailedError as error:\n    print(error)", 0,
        {r"close\(\) \(call 2\) on rank 1 .*rank 0 broke off": 1}, head=HEAD + SIGNS,
    ),
    "end that is interrupted": End(
        AT_THE_END({"call": "pass", "error": "KeyboardInterrupt"}), None,
        {r"\[rank 0 on .*\] KeyboardInterrupt": 1, "Exception ignored": 0}, head=HEAD + SIGNS,
    ),
    "end in which a signal handler exits": End(
        AT_THE_END({"call": "pass", "error": "SystemExit"}), 0, {"while the program ended: SystemExit: alarm": 1},
        head=HEAD + SIGNS,
    ),
    "crash": End(
        STEP.format(what="ctypes.string_at(0)"), None,
        {"Segmentation fault": None, "program.py": None, " in step": None},
    ),
    # Whether the other ranks wait in MPI_Init for the rank, or do not come there for long.
    "exception before the first strategy": End(
        EARLY.replace("FAULT", "raise KeyError('mine')"), 1, {"KeyError: 'mine'": 1, "Traceback": 1}, ranks=3, head=""
    ),
    "exit before the first strategy": End(EARLY.replace("FAULT", "sys.exit(3)"), 3, {}, head=""),
    "mistake of all ranks": End(
        LAUNCHED + "import mpidist\ntime.sleep(60 * rank)\nraise KeyError('ours')\n", 1,
        {"KeyError: 'ours'": 1}, head="",
    ),
    "scheduled function without a join": End(
        FUNCTION, 1, {"KeyError: .*'fail' failed on rank 0: KeyError: 'mine'": 1}, head=""
    ),
    "exit in good order": End(
        LAUNCHED + "import mpidist\nif rank:\n    time.sleep(0.5)\n    print('came')\nsys.exit(0)\n", 0,
        {r"\Acame\n": 1, "came": 1}, head="",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_end_of_a_job_has_its_status_and_its_texts(job, tmp_path, name):
    end = ENDS[name]
    variables = {variable: text.format(folder=tmp_path) for variable, text in (end.variables or {}).items()}
    ended = job(end.program, end.ranks, end.head, **variables)
    assert ended.status == end.status if end.status is not None else ended.status != 0, ended
    for pattern, times in end.said.items():
        found = len(re.findall(pattern, ended.out + ended.err, re.MULTILINE))
        assert found == times if times is not None else found > 0, (pattern, ended)


def test_exception_that_left_a_strategy_and_was_caught_ends_no_rank_in_silence(job):
    program = """
try:
    with strategy:
        if rank == 1:
            raise KeyError("labels")
except KeyError:
    pass  # and on to the next experiment
with mpidist.MultiWorkerMirroredStrategy() as second:
    second.reduce("sum", 1.0)
"""
    ended = job(program, ranks=2)
    assert ended.status != 0
    lines = ended.lines_of(0)
    assert re.search(
        r"close\(\) \(call \d\) on rank . .* rank 1 left because of an exception: KeyError: 'labels'", lines[-1]
    )
    assert "Traceback (most recent call last):" in lines  # nobody else shows where it happened


def test_on_error_raise_keeps_the_job_and_raises_on_the_others(job):
    program = """
strategy.reduce("SUM", 1.0)
if rank == 1:
    raise KeyError("mine")
try:
    reduce_for_ever()
except mpidist.errors.PeerFailedError as error:
    print(f"rank {rank} learns: {error}", flush=True)
    time.sleep(0.5)  # and goes on, undisturbed
    print(f"rank {rank} goes on", flush=True)
"""
    ended = job(program, ranks=2, MPIDIST_ON_ERROR="raise")
    assert "rank 0 learns: rank 1 ended the program" in ended.out
    assert "rank 0 goes on" in ended.out or not IS_MPICH  # Open MPI's launcher ends it at once
    assert ended.err.count("KeyError: 'mine'") == 1
    assert all("waits up to 30 s for other ranks to end" in line for line in ended.lines_of(1))
    assert ended.status != 0


SAME_EVERYWHERE = {
    "InvalidArgumentError": "strategy.reduce('SUM', [1.0] * (rank + 1))",
    "ValueError": "strategy.reduce('median', 1.0)",
    "TopologyError: the environment": "os.environ['MPIDIST_CHECK'] = str(int(rank > 0))\nmpidist.MirroredStrategy()",
    "TopologyError: a resolver": """
from mpidist.cluster_resolver import ClusterSpec, SimpleClusterResolver
mpidist.MultiWorkerMirroredStrategy(SimpleClusterResolver(ClusterSpec({"worker": ["n:1"]})))
""",
}


@pytest.mark.parametrize("said", SAME_EVERYWHERE)
def test_error_that_all_ranks_share_is_shown_once(job, said):
    ended = job(SAME_EVERYWHERE[said], ranks=2)
    assert ended.status != 0
    assert ended.err.count("Traceback (most recent call last):") == 1
    kind = said.split(":")[0]
    shown = [line for rank in range(2) for line in ended.lines_of(rank) if re.match(rf"[\w.]*\b{kind}: ", line)]
    assert len(shown) == 1
    assert not re.findall(r'File ".*/mpidist/\w+', ended.err)
    assert "contextlib" not in ended.err


ORDERLY = """
from mpi4py import MPI
assert "mpidist-start" not in [thread.name for thread in threading.enumerate()], "the watch over the start has ended"
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
try:
    MPI.COMM_WORLD.Send(bytearray(1), 99)
except MPI.Exception:
    note = "an error of MPI is an exception"
assert note
strategy.close()
for code in (0, 7):  # an exit that is caught is the program's affair
    try:
        raise SystemExit(code)
    except SystemExit as caught:
        assert caught.code == code
        caught.code = 8
        assert caught.code == 8
with mpidist.MultiWorkerMirroredStrategy() as another:
    try:
        another.reduce("SUM", [1.0] * (rank + 1))
    except ValueError:
        pass
if os.fork() == 0:
    os._exit(0)
os.wait()
mpidist.MirroredStrategy().reduce("SUM", 1.0)  # left open, as the next one
mpidist.MultiWorkerMirroredStrategy().symmetric_empty(10, float, per_node=True)
"""


@pytest.mark.parametrize("end", ["", "sys.exit(None)", "sys.exit(0)"])
def test_normal_end_is_silent(job, end):
    warnings = "ignore:This process:DeprecationWarning"  # of os.fork, which Python 3.12 and later warn of
    ended = job(ORDERLY + end, ranks=2, PYTHONWARNINGS=warnings)
    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_wrong_launcher_is_refused_with_the_command_to_use(tmp_path):
    """The launcher of another MPI starts worlds of one rank each."""
    script = tmp_path / "program.py"
    script.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\n")
    another = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"} if IS_MPICH else {"PMI_SIZE": "3"}
    ended = end_of([sys.executable, str(script)], **another)
    assert ended.status != 0
    assert "TopologyError" in ended.err
    assert re.search(rf"mpiexec -n 3 \S*python\S* {re.escape(str(script))}", ended.err)


@pytest.mark.parametrize("is_alone", [False, True])
def test_launch_whose_variables_are_removed_is_refused(job, is_alone):
    """Each rank would be alone, and the job end with 0."""
    before = ("env", "-i", "HOME=/tmp", f"PYTHONPATH={PROJECT}", f"MPIDIST_ALONE={is_alone:d}")
    ended = job("import mpidist\nprint(mpidist.MultiWorkerMirroredStrategy().size)", ranks=2, head="", before=before)
    assert (ended.status == 0) == is_alone, ended
    assert ("MPIDIST_ALONE=1" in ended.err) != is_alone
    assert ended.out.count("1") == 2 * is_alone


def test_calls_after_the_program_finalized_mpi_are_python_errors(job):
    program = """
context = mpidist.get_replica_context
if rank == 1:
    await_signs("started 0")  # so that the call of rank 0 has not ended when MPI does
handle = strategy.run(lambda: context().start_all_reduce("sum", 1.0))
leave_sign(f"started {rank}")
from mpi4py import MPI
MPI.Finalize()
for call in (lambda: strategy.reduce("sum", 1.0), handle.wait, strategy.close):
    try:
        call()
    except RuntimeError as error:
        print(error, flush=True)
leave_sign(f"finalized {rank}")
await_signs("finalized 0", "finalized 1")  # the end of one would end the other
sys.exit(9)
"""
    ended = job(SIGNS + program, ranks=2)
    assert ended.status == 9
    refused = re.findall(r"(reduce|wait\(\)|close\(\)) after MPI\.Finalize\(\): the program has ended MPI", ended.out)
    assert {*refused} == {"reduce", "wait()", "close()"}, ended.out  # the wait of rank 1 may have ended before
    assert "MPI routine" not in ended.err


CHILDREN = {
    "pool without a guard": """
import multiprocessing
print(multiprocessing.get_context("spawn").Pool(1).map(len, ["ab"]))
""",
    "fork server": """
import multiprocessing
print(multiprocessing.get_context("forkserver").Pool(1).map(len, ["ab"]))
""",
    "forked, worker, subprocess": """
import multiprocessing, subprocess
if os.fork() == 0:
    mpidist.MultiWorkerMirroredStrategy()
assert os.waitstatus_to_exitcode(os.wait()[1])
worker = multiprocessing.get_context("fork").Process(target=mpidist.MultiWorkerMirroredStrategy)
worker.start()
worker.join()
assert worker.exitcode
sys.exit(subprocess.run([sys.executable, "-c", "import mpidist; mpidist.MultiWorkerMirroredStrategy()"]).returncode)
""",
}


@pytest.mark.parametrize("how", CHILDREN)
def test_child_of_a_rank_is_refused_before_it_starts_mpi(job, how):
    """And the job ends, instead of starting one child after the other."""
    ended = job(CHILDREN[how], ranks=2)
    assert ended.status != 0
    assert "and cannot take the rank's place in MPI. Guard the script" in ended.err
    assert len(how.split(",")) <= ended.err.count("Guard the script") < 12


def test_forked_children_end_by_themselves_and_harm_nothing(job):
    """With their own status, without MPI; a call in them is refused."""
    program = """
import multiprocessing
def work(end):
    try:
        strategy.reduce("SUM", 1.0)
    except RuntimeError as error:
        print("child:", error, flush=True)
    strategy.close()
    end()
def close_and_end():
    sys.stdout.close()
    sys.exit(8)
ends = (lambda: None, lambda: sys.exit(7), lambda: exit("words"), lambda: {}["mine"], close_and_end)
for end in ends:
    child = os.fork()
    if child == 0:
        print("child", end="")
        end()
        sys.exit()
    print(f" forked {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
for end in (ends[0], ends[1], ends[3]) if rank == 0 else ():
    child = multiprocessing.get_context("fork").Process(target=work, args=(end,))
    child.start()
    child.join()
    print(f" worker {child.exitcode}", flush=True)
for _ in range(3):
    assert strategy.reduce("SUM", 1.0) == strategy.num_replicas_in_sync
"""
    ended = job(program, ranks=2)
    assert ended.status == 0, ended.err
    statuses = Counter(re.findall(r"(forked|worker) (\d)", ended.out))  # ranks may print within each other's lines
    forked = {("forked", "0"): 2, ("forked", "7"): 2, ("forked", "1"): 4, ("forked", "8"): 2}
    assert statuses == forked | {("worker", status): 1 for status in "071"}, ended.out
    refused = " reduce in a forked process: a strategy belongs to the process that made it; make"
    assert (ended.out.count(refused), ended.out.count("child")) == (3, 10 + 3), ended.out
    assert ended.err.count("KeyError") == 2 + 1, "as without mpidist"  # lines of two ranks may be mixed


def test_forked_child_ends_where_no_other_file_can_be_opened(job):
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    child = os.fork()
if child == 0:
    sys.exit(7)
for file in files:
    os.close(file)
until = time.monotonic() + 20
while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
    time.sleep(0.01)
if ended[0] == 0:
    os.kill(child, signal.SIGKILL)
print(f"ended with {os.waitstatus_to_exitcode(ended[1])}" if ended[0] else "still lives", flush=True)
"""
    ended = job(program, ranks=2)
    assert (ended.status, ended.out.count("ended with 7")) == (0, 2), ended.out + ended.err


def test_child_with_a_launcher_of_its_own_is_no_child_of_the_rank(job, tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text("import mpidist\nprint(f'{mpidist.MultiWorkerMirroredStrategy().reduce(\"sum\", 1.0)}')\n")
    command = [*Launcher.find(None).command, "-n", "2", sys.executable, str(inner)]
    unset = ("PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDI_", "MPI_LOCAL")
    program = f"""
import subprocess
if rank == 0:
    environment = {{name: value for name, value in os.environ.items() if not name.startswith({unset})}}
    subprocess.run({command}, check=True, env=environment | {OPEN_MPI})
strategy.reduce("sum", 1.0)
"""
    ended = job(program, ranks=2)
    assert (ended.status, ended.out.count("2.0")) == (0, 2), ended


NOT_BUILT = f"""
import time
from mpi4py import MPI
import mpidist
MPI.COMM_WORLD.Barrier()  # all have imported what they need
if MPI.COMM_WORLD.rank == 0:
    time.sleep({LONG_SECONDS})
mpidist.MultiWorkerMirroredStrategy()
"""


@pytest.mark.parametrize("before", [(), ("sh", "-c", '"$@"; exit $?', "sh")], ids=["no shell", "a shell for each rank"])
def test_ranks_warn_that_rank_0_does_not_build_a_strategy(job, before):
    ended = job(NOT_BUILT, head="", before=before, MPIDIST_STALL_SECONDS="1", MPIDIST_TIMEOUT_SECONDS="3")
    pattern = r"building a strategy on rank [12] has waited \d+ s, and not all 3 ranks have come to build it"
    places = r" \(rank 0: \S+program\.py:7 in <module>; ranks 1-2: \S+program\.py:8 in <module>\)"
    assert len(re.findall(pattern + (r"" if before else places), ended.err)) == 1, ended.err


@pytest.mark.parametrize("what", ["raise KeyError('mine')", "sys.exit('mine')"])
def test_traceback_leaves_out_frames_of_the_library_and_names_the_trace(job, tmp_path, what):
    traces = tmp_path / "traces"
    ended = job(STEP.format(what=what), ranks=2, MPIDIST_TRACE=str(traces) if "Key" in what else "")
    lines = ended.lines_of(1)
    assert [line.split(", in ")[1] for line in lines if ", in " in line] == ["<module>", "step"]
    (last,) = [line for line in lines if line.endswith("'mine'" if "Key" in what else "SystemExit: mine")]
    assert lines[-1] == last or "Key" in what
    if "Key" in what:
        require_trace_is_named(ended, 1, traces)


def test_trace_of_a_job_that_ends_well_is_named(job, tmp_path):
    ended = job(STEP.format(what="pass"), ranks=2, MPIDIST_TRACE=str(tmp_path / "traces"))
    require_trace_is_named(ended, 0, tmp_path / "traces")


def require_trace_is_named(ended, rank, traces):
    """Require that this rank says once how to read the trace."""
    (folder,) = traces.iterdir()
    (line,) = [line for line in ended.lines_of(rank) if "trace merge" in line]
    assert line.startswith("waits of the calls: python -m mpidist trace merge ")
    assert Path(line.split()[-1]).name == folder.name
    assert ended.err.count("trace merge") == 1


@pytest.mark.parametrize("is_whole", [False, True])
def test_traceback_hides_frames_of_mpidist_without_the_variable(is_whole):
    """Also in a process without a launcher."""
    command = [sys.executable, "-c", "import mpidist; mpidist.OneDeviceStrategy().run(print, 1, 2)"]
    environment = {**clean_environment(), "PYTHONPATH": PROJECT, "MPIDIST_TRACEBACK": "full" if is_whole else ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: run: args must be a list or tuple, got int; write args=(x, y)"
    assert "line 1, in <module>" in done.stderr
    assert any(line.endswith(", in run") for line in lines) == ("/mpidist/" in done.stderr) == is_whole
    assert (lines[-2] == "  (then within mpidist: MPIDIST_TRACEBACK=full prints these frames, too)") != is_whole


def test_job_of_a_killed_rank_ends_before_a_child_that_the_rank_has_forked(job, tmp_path):
    """Open MPI's ends after it, as its launcher waits for what can write to a rank's output."""
    program = """
if rank == 1:
    if os.fork() == 0:
        time.sleep(20)
        leave_sign("end of the child")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
reduce_for_ever()
"""
    ended = job(program, head=SIGNS + HEAD)
    assert ended.status != 0
    assert "Open MPI" in MPI.Get_library_version() or not (tmp_path / "end of the child").exists()


@pytest.mark.parametrize("status", [3, 0])
def test_immediate_exit_of_a_rank_is_reported(job, tmp_path, status):
    """Also by the exit code, which is never 0."""
    code = tmp_path / "code"
    ended = job(STEP.format(what=f"os._exit({status})"), ranks=2, MPIDIST_EXIT_CODE_FILE=str(code))
    assert code.read_text() == f"{status or 1}\n"
    assert ended.status in (status or 1, 9, 255), "MPICH and Intel MPI sometimes tell how they ended the other ranks"
    assert ended.lines_of(1) == [
        f"os._exit({status}) ends this rank with a strategy that is not closed: the job is not complete"
    ]


# Rank 1 comes when another one has warned of it.
COMES_LATE = """
import logging
import mpidist
class Sign(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        leave_sign("a warning")
logging.getLogger("mpidist").addHandler(Sign())
if rank == 1:
    await_signs("a warning")
"""
WARNING = "starting MPI on rank 0 has waited"


def test_late_rank_at_the_start_is_named_once(job):
    ended = job(LAUNCHED + "import mpidist\n" + SIGNS + COMES_LATE + BUILD_AND_ADD, head="", MPIDIST_STALL_SECONDS="5")
    assert (ended.status, ended.out.count("sum 3.0")) == (0, 3)
    assert ended.err.count("has waited") == ended.err.count(WARNING) == 1
    assert "and rank 1 (process " in ended.err
    assert re.search(r"\) did not come to start it \(rank 1: \S+program\.py:\d+ in await_signs\)", ended.err)


def test_ranks_that_do_not_come_until_the_deadline_end_the_job(job):
    """There a short deadline counts as 10 s, and nobody is late before 5 s. A rank leaves before it has imported."""
    program = (
        LAUNCHED + f"if rank == 2:\n    os._exit(0)\nif rank == 1:\n    time.sleep({LONG_SECONDS})\nimport mpidist\n"
    )
    ended = job(program + BUILD_AND_ADD, head="", MPIDIST_STALL_SECONDS="1", MPIDIST_TIMEOUT_SECONDS="2")
    assert ended.status == 1
    assert len(re.findall(rf"mpidist: {WARNING} \d+ s", ended.err)) == 1
    last = ended.lines_of(0)[-1]
    assert re.match(rf"mpidist\.errors\.DeadlineExceededError: {WARNING} \d\d s, and rank 1 \(process ", last)
    assert ") did not come to start it, and the program of rank 2 has ended. Every rank must" in last
    assert "strategy = mpidist.MultiWorkerMirroredStrategy()" in ended.err  # where the program waits
    assert "start_mpi" not in ended.err  # what lies within the library tells nothing
