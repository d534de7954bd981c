"""How jobs end: by errors of all ranks, in good order, and with children. For errors of one rank see test_faults."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from jobs.failing import SIGNS, Job, end_of
from mpi4py import MPI
from mpi_session.launch import OPEN_MPI, Launcher

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]


IS_MPICH = "MPICH" in MPI.Get_library_version()


def test_exception_that_left_a_strategy_and_was_caught_ends_no_rank_in_silence(job: Job) -> None:
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


def test_exit_with_a_code_on_all_ranks_is_told_once(job: Job) -> None:
    ended = job("strategy.reduce('SUM', 1.0)\nsys.exit(3)", ranks=2)
    assert ended.status == 3
    assert ended.err.count("SystemExit: 3") == 1


def test_rank_that_ends_early_is_named_where_others_wait_for_it(job: Job) -> None:
    """An end without an error is one for those who still reduce."""
    ended = job("strategy.reduce('SUM', 1.0)\nif rank == 1:\n    sys.exit()\nreduce_for_ever()")
    assert ended.status != 0
    assert "PeerFailedError" in ended.err
    assert "rank 1 ended the program while ranks 0, 2 called reduce" in ended.err


@pytest.mark.parametrize("end", ["raise KeyError('mine')", "sys.exit(3)"])
def test_error_of_a_rank_is_raised_on_a_rank_that_calls_later(job: Job, end: str) -> None:
    program = f"""
from mpidist.transport.failures import job_abort
job_abort._ACKNOWLEDGE_SECONDS = 60.0
strategy.reduce("SUM", 1.0)
if rank == 0:
    {end}
time.sleep(2)
reduce_for_ever()
"""
    ended = job(program, ranks=2)
    assert ended.status != 0
    assert any("PeerFailedError" in line and "rank 0 ended" in line for line in ended.lines_of(1)), ended.err


def test_on_error_raise_leaves_the_job_alone_and_others_learn_of_it(job: Job) -> None:
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
def test_error_that_all_ranks_share_is_shown_once(job: Job, said: str) -> None:
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
def test_normal_end_is_silent(job: Job, end: str) -> None:
    ended = job(ORDERLY + end, ranks=2)
    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_job_of_one_rank_keeps_pythons_own_way(job: Job) -> None:
    """Nothing has to be ended."""
    ended = job("print(strategy.reduce('SUM', 1.0), flush=True)\nraise KeyError('mine')", ranks=1)
    assert (ended.status != 0, ended.out) == (True, "1.0\n")
    assert "KeyError: 'mine'" in ended.err


def test_wrong_launcher_is_refused_with_the_command_to_use(tmp_path: Path) -> None:
    """The launcher of another MPI starts worlds of one rank each."""
    script = tmp_path / "program.py"
    script.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\n")
    another = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"} if IS_MPICH else {"PMI_SIZE": "3"}
    ended = end_of([sys.executable, str(script)], **another)
    assert ended.status != 0
    assert "TopologyError" in ended.err
    assert re.search(rf"mpiexec -n 3 \S*python\S* {re.escape(str(script))}", ended.err)


def test_calls_after_the_program_finalized_mpi_are_python_errors(job: Job) -> None:
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
def test_child_of_a_rank_is_refused_before_it_starts_mpi(job: Job, how: str) -> None:
    """And the job ends, instead of starting one child after the other."""
    ended = job(CHILDREN[how], ranks=2)
    assert ended.status != 0
    assert "and cannot take the rank's place in MPI. Guard the script" in ended.err
    assert len(how.split(",")) <= ended.err.count("Guard the script") < 12


def test_forked_children_end_by_themselves_and_harm_nothing(job: Job) -> None:
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
ends = (lambda: None, lambda: sys.exit(7), lambda: exit("words"), lambda: {}["mine"])
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
    forked = {("forked", "0"): 2, ("forked", "7"): 2, ("forked", "1"): 4}
    assert statuses == forked | {("worker", status): 1 for status in "071"}, ended.out
    refused = " reduce in a forked process: a strategy belongs to the process that made it; make"
    assert (ended.out.count(refused), ended.out.count("child")) == (3, 8 + 3), ended.out
    assert ended.err.count("KeyError: 'mine'") == 2 + 1, "as without mpidist"


def test_child_with_a_launcher_of_its_own_is_no_child_of_the_rank(job: Job, tmp_path: Path) -> None:
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
