"""An error that nobody catches ends the whole job, soon, and says once where it happened. Real jobs of 3 ranks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from jobs.failing import HEAD, LONG_SECONDS, Ended, Job, end_of, job
from mpi4py import MPI
from mpi_session.launch import OPEN_MPI, Launcher

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

__all__ = ["job"]

IS_MPICH = "MPICH" in MPI.Get_library_version()

OTHERS = {"others reduce": "reduce_for_ever()", "others compute": f"time.sleep({LONG_SECONDS})"}

whatever_others_do = pytest.mark.parametrize("others", OTHERS)


@whatever_others_do
def test_uncaught_exception_on_one_rank_ends_all_of_them(job: Job, others: str) -> None:
    """api.md, section 4; T116."""
    ended = job(f"strategy.reduce('SUM', 1.0)\nif rank == 1:\n    {{}}['mine']\n{OTHERS[others]}")
    assert ended.status != 0
    lines = ended.lines_of(1)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'mine'"
    assert ended.err.count("Traceback") == 1
    follows = r"PeerFailedError: reduce \(call \d+\) on rank . cannot complete: rank 1 ended: KeyError: 'mine'"
    for rank in (0, 2):
        said = ended.lines_of(rank)
        assert len(said) == (others == "others reduce")
        assert all(re.fullmatch(follows, line) for line in said)


def test_exception_inside_run_and_a_with_statement_ends_all_ranks(job: Job) -> None:
    program = """
def step():
    if rank == 2:
        raise KeyError("mine")
    mpidist.get_replica_context().all_reduce("SUM", 1.0)
with strategy, strategy.scope():
    strategy.run(step)
"""
    ended = job(program)
    assert ended.status != 0
    assert ended.lines_of(2)[-1] == "KeyError: 'mine'"
    assert ended.err.count("Traceback") == 1


def test_exception_between_start_and_wait_is_the_one_that_is_shown(job: Job) -> None:
    """Also where other ranks learn of it in a started call, and raise in the call after that one."""
    program = """
import numpy
def step(number):
    context = mpidist.get_replica_context()
    handle = context.start_all_reduce("sum", numpy.ones(300_000))
    if rank == 1 and number == 3:
        raise KeyError("mine")
    context.all_reduce("sum", 1.0)
    handle.wait()
for number in range(5):
    strategy.run(step, args=(number,))
"""
    ended = job(program)
    assert ended.status == 1
    assert ended.lines_of(1)[-1] == "KeyError: 'mine'"
    assert ended.err.count("Traceback") == 1
    for other in (0, 2):
        (line,) = ended.lines_of(other)
        assert re.fullmatch(
            rf"PeerFailedError: \w+ \(call \d+\) on rank {other} .* rank 1 ended: KeyError: 'mine'", line
        )


@pytest.mark.parametrize("rank", [0, 2])
def test_exception_under_way_in_close_is_shown(job: Job, rank: int) -> None:
    """The commonest form of such a program: the exception must not be lost, nor another rank's be shown for it."""
    program = f"""
try:
    for step in range(3):
        if step == 1 and rank == {rank}:
            raise KeyError("labels")
        strategy.reduce("sum", 1.0)
finally:
    strategy.close()
"""
    ended = job(program)
    assert ended.status == 1
    assert ended.lines_of(rank)[-1] == "KeyError: 'labels'"
    assert ended.err.count("Traceback") == 1
    for other in {0, 1, 2} - {rank}:
        for line in ended.lines_of(other):
            assert re.search(rf"PeerFailedError: .* rank {rank} left because of an exception: KeyError: 'labels'", line)


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
    ended = job(program)
    assert ended.status != 0
    lines = ended.lines_of(0) or ended.lines_of(2)
    assert re.search(
        r"close\(\) \(call \d\) on rank . .* rank 1 left because of an exception: KeyError: 'labels'", lines[-1]
    )
    assert "Traceback (most recent call last):" in lines  # nobody else shows where it happened


EXITS = {
    "sys.exit(3)": 3,
    "sys.exit('no data')": 1,
    "raise SystemExit(4)": 4,
    "exit(5)": 5,
    "early_exit(6)": 6,
    "sys.exit(0.0)": 1,
}


@pytest.mark.parametrize("how", EXITS)
def test_exit_with_a_code_on_one_rank_ends_all_of_them_with_this_code(job: Job, how: str) -> None:
    """api.md, section 4: as an uncaught exception does, however the rank exits."""
    others = list(OTHERS.values())[len(how) % 2]
    program = f"strategy.reduce('SUM', 1.0)\nif rank == 1:\n    {how}\n{others}"
    ended = job(program, head=f"from sys import exit as early_exit\n{HEAD}")
    assert ended.status == EXITS[how]
    assert re.search(r"SystemExit: (\d|no data)", "\n".join(ended.lines_of(1)))
    assert ended.err.count("Traceback") == (not how.startswith("raise"))


def test_exit_that_is_caught_is_the_programs_affair(job: Job) -> None:
    program = """
for code in (0, 7):
    try:
        raise SystemExit(code)
    except SystemExit as caught:
        assert caught.code == code
        caught.code = 8
        assert caught.code == 8
strategy.reduce("sum", 1.0)
sys.exit(None)
"""
    assert job(program) == Ended(0, "", "")


def test_exit_with_a_code_on_all_ranks_is_told_once(job: Job) -> None:
    ended = job("strategy.reduce('SUM', 1.0)\nsys.exit(3)")
    assert ended.status == 3
    assert ended.err.count("SystemExit: 3") == 1


def test_rank_that_ends_early_is_named_where_others_wait_for_it(job: Job) -> None:
    """X27: an end without an error is one for those who still reduce."""
    ended = job("strategy.reduce('SUM', 1.0)\nif rank == 1:\n    sys.exit()\nreduce_for_ever()")
    assert ended.status != 0
    assert "PeerFailedError" in ended.err
    assert "rank 1 ended the program while ranks 0, 2 called reduce" in ended.err


def test_on_error_raise_leaves_the_job_alone_and_others_learn_of_it(job: Job) -> None:
    """api.md, section 4."""
    program = """
strategy.reduce("SUM", 1.0)
if rank == 1:
    raise KeyError("mine")
try:
    reduce_for_ever()
except mpidist.errors.PeerFailedError as error:
    print(f"rank {rank} learns: {error}", flush=True)
    time.sleep(1)  # and goes on, undisturbed
    print(f"rank {rank} goes on", flush=True)
"""
    ended = job(program, MPIDIST_ON_ERROR="raise")
    for rank in (0, 2):
        assert re.search(rf"rank {rank} learns: rank 1 ended the program", ended.out)
        assert f"rank {rank} goes on" in ended.out or not IS_MPICH  # Open MPI's launcher ends them at once
    assert ended.err.count("KeyError: 'mine'") == 1
    assert all("waits up to 30 s for other ranks to end" in line for line in ended.lines_of(1))
    assert ended.status != 0


SAME_EVERYWHERE = {
    "InvalidArgumentError": "strategy.reduce('SUM', [1.0] * (rank + 1))",
    "ValueError": "strategy.reduce('median', 1.0)",
    "InvalidTypeError": "strategy.reduce('SUM', 'text')",
    "InvalidArgumentError: gather": "strategy.gather(1.0, 0)",
    "TopologyError: the environment": "os.environ['MPIDIST_CHECK'] = str(int(rank > 0))\nmpidist.MirroredStrategy()",
    "TopologyError: a resolver": """
from mpidist.cluster_resolver import ClusterSpec, SimpleClusterResolver
mpidist.MultiWorkerMirroredStrategy(SimpleClusterResolver(ClusterSpec({"worker": ["n:1"]})))
""",
    "TopologyError: MirroredStrategy": "os.environ['MPIDIST_PRETEND_NODES'] = '0,1,1'\nmpidist.MirroredStrategy()",
}


@pytest.mark.parametrize("said", SAME_EVERYWHERE)
def test_error_that_all_ranks_share_is_shown_once(job: Job, said: str) -> None:
    ended = job(SAME_EVERYWHERE[said])
    assert ended.status != 0
    assert ended.err.count("Traceback (most recent call last):") == 1
    kind = said.split(":")[0]
    shown = [line for rank in range(3) for line in ended.lines_of(rank) if re.match(rf"[\w.]*\b{kind}: ", line)]
    assert len(shown) == 1
    assert not re.findall(r'File ".*/mpidist/\w+', ended.err)
    assert "contextlib" not in ended.err


NORMAL_ENDS = {
    "closed": "strategy.reduce('SUM', 1.0)\nstrategy.close()",
    "with statement": "with strategy:\n    strategy.reduce('SUM', 1.0)",
    "left open": "strategy.reduce('SUM', 1.0)",
    "exit 0": "strategy.reduce('SUM', 1.0)\nsys.exit(0)",
    "left open with shared memory": "strategy.symmetric_empty(10, float, per_node=True)",
    "after a caught error": """
try:
    strategy.reduce("SUM", [1.0] * (rank + 1))
except ValueError:
    pass
""",
    "two left open": "mpidist.MirroredStrategy().reduce('SUM', 1.0)",
}


@pytest.mark.parametrize("how", NORMAL_ENDS)
def test_normal_end_is_silent(job: Job, how: str) -> None:
    ended = job(NORMAL_ENDS[how])
    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_single_process_keeps_pythons_own_way(job: Job) -> None:
    """Plain `python` is no launcher: nothing has to be ended."""
    ended = job("raise KeyError('mine')", ranks=1)
    assert ended.status != 0
    assert "KeyError: 'mine'" in ended.err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", ["waiting for others", "computing"])
def test_signal_to_one_rank_ends_all_of_them(job: Job, name: str, where: str) -> None:
    """api.md, section 4: also while the rank waits in a collective for ranks that do not come."""
    work = "strategy.reduce('SUM', 1.0)" if where == "waiting for others" else f"time.sleep({LONG_SECONDS})"
    program = f"""
if rank == 1:
    threading.Timer(0.5, os.kill, [os.getpid(), signal.{name}]).start()
    {work}
time.sleep({LONG_SECONDS})
"""
    ended = job(program)
    assert ended.status != 0
    if name == "SIGINT":
        assert ended.lines_of(1)[-1] == "KeyboardInterrupt"


def test_wrong_launcher_is_refused_with_the_command_to_use(tmp_path: Path) -> None:
    """users.md 2.2: the launcher of another MPI starts worlds of one rank each."""
    script = tmp_path / "program.py"
    script.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\n")
    another = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"} if IS_MPICH else {"PMI_SIZE": "3"}
    ended = end_of([sys.executable, str(script)], **another)
    assert ended.status != 0
    assert "TopologyError" in ended.err
    assert re.search(rf"mpiexec -n 3 \S*python\S* {re.escape(str(script))}", ended.err)


def test_plain_python_is_a_job_of_one_rank(tmp_path: Path) -> None:
    """api.md, section 1."""
    script = tmp_path / "program.py"
    script.write_text("import mpidist\nprint(mpidist.MirroredStrategy().reduce('SUM', 1.0))\n")
    ended = end_of([sys.executable, str(script)])
    assert (ended.status, ended.out, ended.err) == (0, "1.0\n", "")


@pytest.mark.parametrize("call", ["strategy.reduce('sum', 1.0)", "handle.wait()", "strategy.close()"])
def test_call_after_the_program_finalized_mpi_is_a_python_error(job: Job, call: str) -> None:
    program = f"""
context = mpidist.get_replica_context
handle = strategy.run(lambda: context().start_all_reduce("sum", 1.0))
from mpi4py import MPI
MPI.Finalize()
try:
    {call}
except RuntimeError as error:
    print(error, flush=True)
    sys.exit(9)
"""
    ended = job(program)
    assert ended.status == 9
    assert "after MPI.Finalize(): the program has ended MPI" in ended.out
    assert "MPI routine" not in ended.err


CHILDREN = {
    "pool without a guard": """
import multiprocessing
print(multiprocessing.get_context("spawn").Pool(1).map(len, ["ab"]))
""",
    "worker": """
import concurrent.futures, multiprocessing
if __name__ == "__main__":
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pool.submit(mpidist.MultiWorkerMirroredStrategy).result()
""",
    "fork server": """
import multiprocessing
print(multiprocessing.get_context("forkserver").Pool(1).map(len, ["ab"]))
""",
    "forked": """
if os.fork() == 0:
    mpidist.MultiWorkerMirroredStrategy()
sys.exit(os.wait()[1] >> 8)
""",
    "subprocess": """
import subprocess
sys.exit(subprocess.run([sys.executable, "-c", "import mpidist; mpidist.MultiWorkerMirroredStrategy()"]).returncode)
""",
}


@pytest.mark.parametrize("how", CHILDREN)
def test_child_of_a_rank_is_refused_before_it_starts_mpi(job: Job, how: str) -> None:
    """And the job ends, instead of starting one child after the other."""
    head = (
        HEAD
        if how != "worker"
        else HEAD.replace("strategy = ", "if __name__ == '__main__':\n    strategy = ").replace(
            "rank = ", "    rank = "
        )
    )
    ended = job(CHILDREN[how], head=head, ranks=2)
    assert ended.status != 0
    assert "and cannot take the rank's place in MPI. Guard the script" in ended.err
    assert ended.err.count("Guard the script") < 12


def test_forked_child_ends_with_its_own_status_and_without_mpi(job: Job) -> None:
    program = """
for end in (lambda: None, lambda: sys.exit(7), lambda: exit("words"), lambda: {}["mine"]):
    child = os.fork()
    if child == 0:
        print("child", end="")
        end()
        sys.exit()
    print(f" ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
strategy.reduce("sum", 1.0)
"""
    ended = job(program, ranks=2)
    assert ended.status == 0, ended.err
    statuses = Counter(re.findall(r"ended with (\d)", ended.out))  # ranks may print in the middle of each other's lines
    assert (statuses, ended.out.count("child")) == ({"0": 2, "7": 2, "1": 4}, 8), ended.out
    assert ended.err.count("KeyError: 'mine'") == 2, "as without mpidist"


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


FORKED = """
import multiprocessing
strategy.reduce("SUM", 1.0)
def work():
    try:
        strategy.reduce("SUM", 1.0)
    except RuntimeError as error:
        print("child:", error, flush=True)
    strategy.close()
    {end}
if rank == 0:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    print("status", child.exitcode, flush=True)
for _ in range(3):
    assert strategy.reduce("SUM", 1.0) == strategy.num_replicas_in_sync
strategy.close()
print("done", flush=True)
"""


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1)])
def test_a_forked_worker_harms_nothing(job: Job, end: str, status: int) -> None:
    """A call in it is refused, and its end, however it comes, is its own."""
    ended = job(FORKED.format(end=end))
    assert ended.status == 0, ended.err
    assert "child: reduce in a forked process: a strategy belongs to the process that made it; make" in ended.out
    assert f"status {status}" in ended.out
    assert ended.out.count("done") == 3


def test_exit_code_is_written_where_a_script_asks_for_it(job: Job, tmp_path: Path) -> None:
    """Of the rank that ends the job, not of those that follow it."""
    file = tmp_path / "code"
    job("sys.exit(3) if rank == 1 else reduce_for_ever()", MPIDIST_EXIT_CODE_FILE=str(file))
    assert file.read_text() == "3\n"
