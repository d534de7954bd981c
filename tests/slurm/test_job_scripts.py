"""The job scripts of the project, submitted to a real Slurm of several nodes, with each MPI library."""

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from mpi_session import HANG_SECONDS
from slurm.batch_jobs import LIBRARIES, PROJECT, BatchJob, Ended, job_environment, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(5 * HANG_SECONDS)]

Submit = Callable[..., BatchJob]

ONE_TASK = ("--nodes=1", "--ntasks-per-node=1")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
# scikit-learn leaves in the heap what MPICH once sent along with its addresses when MPI started after it.
TRAIN = """
import sklearn.datasets
import mpidist

with mpidist.MultiWorkerMirroredStrategy() as strategy:
    total = strategy.reduce("sum", strategy.topology.rank + 1)
    if strategy.is_chief:
        print(f"{strategy.topology}; the sum is {total}")
"""
SERVE = """
import os
import sklearn.datasets
import mpidist
from mpidist.experimental import ParameterServerStrategy

with ParameterServerStrategy(num_ps=int(os.environ["NUM_PS"])) as strategy:
    if strategy.is_ps:
        strategy.serve()
    else:
        with strategy.scope():
            total = mpidist.Variable(0.0)
        total.assign_add(strategy.topology.rank + 1)
        strategy.barrier()
        if strategy.is_chief:
            print(f"{strategy.topology.size} workers; the sum is {float(total)}")
"""
END = """
import sys
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.topology.rank == 1:
    if sys.argv[1] == "1":
        raise KeyError("no such picture")
    sys.exit(int(sys.argv[1]))
while True:
    strategy.reduce("sum", 1.0)
"""
WORK = """
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.is_chief:
    print("works", flush=True)
while True:
    strategy.reduce("sum", 1.0)
"""
# The last words of jobs, by the words of `mpidist sbatch` that submit them.
SUBMITTED = {  # what they end with; Slurm chooses the nodes of jobs that run side by side
    "--nodes 2 --ntasks-per-node 1 train.py": r"node 1 \(n\d\): rank 1; the sum is 3",
    "--nodes 1 --ntasks-per-node 1 --ps 1 serve.py": r"1 workers; the sum is 1\.0",
    "--nodes 1 --gpus-per-node 2 train.py": r"2 ranks on 1 node; node 0 \(n\d\): ranks 0-1; the sum is 3",
    "--nodes 1 --ntasks-per-node 1 --requeue train.py": "the sum is 1",
}


@pytest.fixture(params=LIBRARIES)
def submit_job(cluster: EmulatedCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Submit:
    """Submit a job script, with each MPI library."""
    return partial(submit, cluster, tmp_path, request.param)


@pytest.fixture
def plain_roles(tmp_path: Path) -> Path:
    """The script of roles without its second component."""
    first, _, rest = (PROJECT / "slurm" / "roles.sbatch").read_text().partition("#SBATCH hetjob\n")
    shutil.copy(PROJECT / "slurm" / "env.sh", tmp_path)
    script = tmp_path / "roles.sbatch"
    script.write_text(first + "".join(line for line in rest.splitlines(True) if not line.startswith("#SBATCH")))
    return script


def require_lines(ended: Ended, *lines: str) -> None:
    """Require that a job came to a good end, and wrote this and nothing else."""
    assert (ended.state, ended.code, ended.output.splitlines()) == ("COMPLETED", 0, [*lines])


def test_training_on_two_nodes(submit_job: Submit) -> None:
    job = submit_job("train.sbatch", TRAIN)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 4, nodes: 2",
        "4 ranks on 2 nodes; node 0 (n1): ranks 0-1; node 1 (n2): ranks 2-3; the sum is 10",
    )


def test_program_that_starts_mpi_before_mpidist(submit_job: Submit) -> None:
    """And fills the heap before: pmi2 garbled what UCX sends then, and the job waited for ever."""
    program = TRAIN.replace("import mpidist\n", "from mpi4py import MPI\nimport mpidist\n")
    ended = submit_job("train.sbatch", program, *TWO_NODES).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)


def test_training_by_one_task(submit_job: Submit) -> None:
    job = submit_job("train.sbatch", TRAIN, *ONE_TASK)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 1, nodes: 1",
        "1 rank on 1 node; node 0 (n1): rank 0; the sum is 1",
    )


def test_workers_and_servers(submit_job: Submit) -> None:
    """A heterogeneous job: two workers on a node each, and a server on a third."""
    job = submit_job("roles.sbatch", SERVE, *TWO_NODES, ":", *ONE_TASK)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; components: 2",
        "workers: 2, parameter servers: 1",
        "2 workers; the sum is 3.0",
    )


@pytest.mark.parametrize("code", [1, 3, 75])
def test_exit_code_of_a_rank_is_that_of_the_job(submit_job: Submit, code: int) -> None:
    ended = submit_job("train.sbatch", END, *TWO_NODES, arguments=(str(code),)).end()
    assert (ended.state, ended.code) == ("FAILED", code), str(ended)
    assert ended.output.count("Traceback") == 1, str(ended)


def test_exit_code_of_a_heterogeneous_job(submit_job: Submit) -> None:
    ended = submit_job("roles.sbatch", END, *ONE_TASK, ":", *ONE_TASK, arguments=("3",)).end()
    assert (ended.state, ended.code) == ("FAILED", 3), str(ended)


def test_cancelled_job_leaves_no_process(submit_job: Submit) -> None:
    job = submit_job("train.sbatch", WORK)
    job.wait_for_output("works")
    assert len(job.processes()) > 4
    assert job.cancel().state == "CANCELLED"
    assert job.processes() == []


@pytest.mark.parametrize("script", ["train.sbatch", "roles.sbatch"])
def test_program_that_is_not_there(submit_job: Submit, script: str) -> None:
    ended = submit_job(script, "").end()
    assert ended.state == "FAILED"
    assert ended.code, str(ended)
    assert "can't open file" in ended.output


def test_servers_of_a_plain_job(submit_job: Submit, plain_roles: Path) -> None:
    job = submit_job(plain_roles, SERVE, NUM_PS="2")
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 4, nodes: 2",
        "workers: 2, parameter servers: 2",
        "2 workers; the sum is 3.0",
    )


@pytest.mark.parametrize("num_ps", ["0", "4", "many"])
def test_number_of_servers_that_cannot_be(submit_job: Submit, plain_roles: Path, num_ps: str) -> None:
    ended = submit_job(plain_roles, SERVE, NUM_PS=num_ps).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    text = "the job has 4 tasks: needed are 1 or more servers, and 1 or more workers"
    assert ended.output.splitlines()[1:] == [f"NUM_PS is '{num_ps}', and {text}"]


@pytest.mark.parametrize("script", ["train.sbatch", "scaling.sbatch"])
def test_script_without_a_program(cluster: EmulatedCluster, tmp_path: Path, script: str) -> None:
    ended = submit(cluster, tmp_path, LIBRARIES[0], script, "", *TWO_NODES, program_name=None, MPI_TYPE="pmi2").end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert ended.output.splitlines()[1:] == ["there is no program to run: sbatch JOB_SCRIPT train.py"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_command_submits_what_runs(cluster: EmulatedCluster, tmp_path: Path, library: str) -> None:
    """`mpidist sbatch` asks the library, and Slurm, how ranks are started."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "serve.py").write_text(SERVE)
    environment = job_environment(cluster, library)
    python = str(Path(environment.pop("VIRTUAL_ENV")) / "bin" / "python")

    def submit_with(options: str) -> str:
        command = [python, "-m", "mpidist", "sbatch", "--time", "10", *options.split()]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("Submitted batch job ").strip()

    jobs = {options: BatchJob(cluster, submit_with(options), tmp_path) for options in SUBMITTED}
    for options, job in jobs.items():
        ended = job.end()
        assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
        assert re.search(f"{SUBMITTED[options]}$", ended.output.splitlines()[-1]), str(ended)
