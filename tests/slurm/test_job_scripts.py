"""The job scripts of the project, submitted to a real Slurm of several nodes, with each MPI library."""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from jobs.failing import ran
from mpi_session import HANG_SECONDS
from slurm.batch_jobs import LIBRARIES, PROJECT, BatchJob, job_environment, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(5 * HANG_SECONDS)]


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
END_BEFORE_START = """
import os, sys
import mpidist

if os.environ["SLURM_PROCID"] == "1":
    {}
strategy = mpidist.MultiWorkerMirroredStrategy()
"""
WORK = """
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.is_chief:
    print("works", flush=True)
while True:
    strategy.reduce("sum", 1.0)
"""
WITHOUT_MPI = """
import time
from pathlib import Path
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
size = strategy.topology.size
strategy.broadcast(1.0)
Path(f"has-{strategy.topology.rank}").touch()
end = time.monotonic() + 60
while len(have := [*Path().glob("has-*")]) < size and time.monotonic() < end:  # as NCCL and gloo wait
    time.sleep(0.01)
if strategy.is_chief:
    print(len(have), "of", size, "ranks have the number")
"""
# The last words of jobs, by the words of `mpidist sbatch` that submit them.
SUBMITTED = {  # what they end with; Slurm chooses the nodes of jobs that run side by side
    "--nodes 2 --ntasks-per-node 1 train.py": r"node 1 \(n\d\): rank 1; the sum is 3",
    "--nodes 1 --ntasks-per-node 1 --ps 1 serve.py": r"1 workers; the sum is 1\.0",
    "--nodes 1 --gpus-per-node 2 train.py": r"2 ranks on 1 node; node 0 \(n\d\): ranks 0-1; the sum is 3",
    "--nodes 1 --ntasks-per-node 1 --requeue train.py": "the sum is 1",
}


@pytest.fixture(params=LIBRARIES)
def submit_job(cluster, tmp_path, request):
    """Submit a job script, with each MPI library."""
    return partial(submit, cluster, tmp_path, request.param)


@pytest.fixture
def plain_roles(tmp_path):
    """The script of roles without its second component."""
    first, _, rest = (PROJECT / "slurm" / "roles.sbatch").read_text().partition("#SBATCH hetjob\n")
    shutil.copy(PROJECT / "slurm" / "env.sh", tmp_path)
    script = tmp_path / "roles.sbatch"
    script.write_text(first + "".join(line for line in rest.splitlines(True) if not line.startswith("#SBATCH")))
    return script


def require_lines(ended, *lines):
    """Require that a job came to a good end, and wrote this and nothing else."""
    assert (ended.state, ended.code, ended.output.splitlines()) == ("COMPLETED", 0, [*lines])


def test_training_on_two_nodes(submit_job):
    job = submit_job("train.sbatch", TRAIN)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 4, nodes: 2",
        "4 ranks on 2 nodes; node 0 (n1): ranks 0-1; node 1 (n2): ranks 2-3; the sum is 10",
    )


def test_program_that_starts_mpi_before_mpidist(submit_job):
    """And fills the heap before: pmi2 garbled what UCX sends then, and the job waited for ever."""
    program = TRAIN.replace("import mpidist\n", "from mpi4py import MPI\nimport mpidist\n")
    ended = submit_job("train.sbatch", program, *TWO_NODES).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)


def test_training_by_one_task(submit_job):
    job = submit_job("train.sbatch", TRAIN, *ONE_TASK)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 1, nodes: 1",
        "1 rank on 1 node; node 0 (n1): rank 0; the sum is 1",
    )


def test_workers_and_servers(submit_job):
    """A heterogeneous job: two workers on a node each, and a server on a third."""
    job = submit_job("roles.sbatch", SERVE, *TWO_NODES, ":", *ONE_TASK)
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; components: 2",
        "workers: 2, parameter servers: 1",
        "2 workers; the sum is 3.0",
    )


def test_components_in_another_order_than_their_nodes(submit_job):
    """Slurm's PMIx tells Open MPI then that all are one node; and no warning says that they cannot share memory."""
    job = submit_job("roles.sbatch", TRAIN, *ONE_TASK, "--nodelist=n3", ":", *ONE_TASK, "--nodelist=n1")
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; components: 2",
        "workers: 1, parameter servers: 1",
        "2 ranks on 2 nodes; node 0 (n3): rank 0; node 1 (n1): rank 1; the sum is 3",
    )


def test_unequal_components_in_another_order(cluster, tmp_path):
    """MPI_Init waited for ever, as Slurm's pmi2 told MPICH wrong neighbours."""
    where = ("--nodes=1", "--ntasks-per-node=2", "--nodelist=n3", ":", *ONE_TASK, "--nodelist=n1")
    ended = submit(cluster, tmp_path, MPICH, "roles.sbatch", TRAIN, *where).end()
    assert ended.output.endswith("3 ranks on 2 nodes; node 0 (n3): ranks 0-1; node 1 (n1): rank 2; the sum is 6\n"), (
        ended
    )


def test_tasks_in_an_arbitrary_order(submit_job, tmp_path):
    """Slurm's pmi2 tells MPICH then that each rank has a node of its own."""
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn2\nn2\nn1\n")
    job = submit_job("train.sbatch", TRAIN, "--ntasks=4", SLURM_DISTRIBUTION="arbitrary", SLURM_HOSTFILE=str(hosts))
    text = "4 ranks on 2 nodes; node 0 (n1): ranks 0, 3; node 1 (n2): ranks 1-2; the sum is 10"
    require_lines(job.end(), f"job {job.number}, attempt 0; ranks: 4, nodes: 2", text)


def test_last_messages_of_a_process_arrive(submit_job, plain_roles):
    """Of ranks dealt out over nodes, in half of the runs one waited for what another one had not sent when it ended."""
    job = submit_job(plain_roles, SERVE, "--nodes=3", "--ntasks=6", SLURM_DISTRIBUTION="cyclic", NUM_PS="1")
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 6, nodes: 3",
        "workers: 5, parameter servers: 1",
        "5 workers; the sum is 15.0",
    )


def test_messages_arrive_without_later_calls_of_mpi(submit_job):
    """MPICH over libfabric's `sockets` sent short ones at the sender's next call: torch's groups waited for ever."""
    job = submit_job("train.sbatch", WITHOUT_MPI, "--nodes=3", "--ntasks=6", SLURM_DISTRIBUTION="cyclic")
    ended = job.end()
    assert ended.output.endswith("6 of 6 ranks have the number\n"), str(ended)


@pytest.mark.parametrize("code", [1, 3, 75])
def test_exit_code_of_a_rank_is_that_of_the_job(submit_job, code):
    ended = submit_job("train.sbatch", END, *TWO_NODES, arguments=(str(code),)).end()
    assert (ended.state, ended.code) == ("FAILED", code), str(ended)
    assert ended.output.count("Traceback") == 1, str(ended)


@pytest.mark.parametrize(("end", "code"), [("{}[0]", 1), ("sys.exit(3)", 3)])
def test_exit_code_before_the_first_strategy_is_that_of_the_job(submit_job, end, code):
    """Not that of the ranks that srun ends then, by a signal: 143."""
    ended = submit_job("train.sbatch", END_BEFORE_START.format(end), *TWO_NODES).end()
    assert (ended.state, ended.code) == ("FAILED", code), str(ended)


@pytest.mark.parametrize("library", LIBRARIES)
def test_exit_code_of_a_child_of_a_rank_is_not_that_of_the_job(cluster, tmp_path, library):
    children = ["-c", "import mpidist; exit(3)"], ["-m", "mpidist", "checkpoint", "none"]
    program = f"import subprocess, sys\nfor words in {children}:\n    subprocess.run([sys.executable, *words])\n{ADD}"
    ended = submit(cluster, tmp_path, library, "train.sbatch", program, *TWO_NODES).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)


def test_exit_code_of_a_heterogeneous_job(submit_job):
    ended = submit_job("roles.sbatch", END, *ONE_TASK, ":", *ONE_TASK, arguments=("3",)).end()
    assert (ended.state, ended.code) == ("FAILED", 3), str(ended)


def test_cancelled_job_leaves_no_process(submit_job):
    job = submit_job("train.sbatch", WORK)
    job.wait_for_output("works")
    assert len(job.processes()) > 4
    assert job.cancel().state == "CANCELLED"
    assert job.processes() == []


@pytest.mark.parametrize("script", ["train.sbatch", "roles.sbatch"])
def test_program_that_is_not_there(submit_job, script):
    ended = submit_job(script, "").end()
    assert ended.state == "FAILED"
    assert ended.code, str(ended)
    assert "can't open file" in ended.output


def test_servers_of_a_plain_job(submit_job, plain_roles):
    job = submit_job(plain_roles, SERVE, NUM_PS="2")
    require_lines(
        job.end(),
        f"job {job.number}, attempt 0; ranks: 4, nodes: 2",
        "workers: 2, parameter servers: 2",
        "2 workers; the sum is 3.0",
    )


@pytest.mark.parametrize("num_ps", ["0", "4", "many"])
def test_number_of_servers_that_cannot_be(submit_job, plain_roles, num_ps):
    ended = submit_job(plain_roles, SERVE, NUM_PS=num_ps).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    text = "the job has 4 tasks: needed are 1 or more servers, and 1 or more workers"
    assert ended.output.splitlines()[1:] == [f"NUM_PS is '{num_ps}', and {text}"]


@pytest.mark.parametrize("script", ["train.sbatch", "scaling.sbatch"])
def test_script_without_a_program(cluster, tmp_path, script):
    ended = submit(cluster, tmp_path, LIBRARIES[0], script, "", *TWO_NODES, program_name=None, MPI_TYPE="pmi2").end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert ended.output.splitlines()[1:] == ["there is no program to run: sbatch JOB_SCRIPT train.py"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_sbatch_command_submits_jobs_that_complete(cluster, tmp_path, library):
    """`mpidist sbatch` asks the library, and Slurm, how ranks are started."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "serve.py").write_text(SERVE)
    environment = job_environment(cluster, library)
    python = str(Path(environment.pop("VIRTUAL_ENV")) / "bin" / "python")

    def submit_with(options):
        command = [python, "-m", "mpidist", "sbatch", "--time", "10", *options.split()]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("Submitted batch job ").strip()

    jobs = {options: BatchJob(cluster, submit_with(options), tmp_path) for options in SUBMITTED}
    for options, job in jobs.items():
        ended = job.end()
        assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
        assert re.search(f"{SUBMITTED[options]}$", ended.output.splitlines()[-1]), str(ended)


SCRIPTS = PROJECT / "slurm"
MPICH, OPEN_MPI = LIBRARIES
NO_MPI = {"MPI_TYPE": "pmi2"}  # of programs without MPI: nothing has to be found out
SHORT = "--time=10"
ADD = """
import mpidist

with mpidist.MultiWorkerMirroredStrategy() as strategy:
    total = strategy.reduce("sum", strategy.topology.rank + 1)
    if strategy.is_chief:
        print("the sum is", total)
"""


def test_train_script_gives_ranks_a_gpu(cluster, tmp_path):
    program = "import os; print(os.environ['SLURM_LOCALID'], 'of', os.environ['CUDA_VISIBLE_DEVICES'])"
    ended = submit(cluster, tmp_path, MPICH, "train.sbatch", program, "--gpus-per-node=2", **NO_MPI).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert sorted(ended.output.splitlines()[1:]) == ["0 of 0,1"] * 2 + ["1 of 0,1"] * 2


def test_more_ranks_than_gpus(cluster, tmp_path):
    options = ("--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=2")
    ended = submit(cluster, tmp_path, MPICH, "train.sbatch", "print('began')", *options, **NO_MPI).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    text = "a node has 3 ranks and 2 GPUs: needed is a GPU for each rank, by --gpus-per-node=3"
    assert ended.output.splitlines()[1:] == [text]


def test_chain_goes_on_after_the_loss_of_a_node(tmp_path):
    """Rank 1 has ended well on the node that is lost; rank 0 fails before Slurm misses the node."""
    program = """
import os, pathlib, time
step = pathlib.Path("step")  # the process of Slurm that starts rank 1 and reports its end
if os.environ["SLURM_PROCID"] == "1":
    step.symlink_to(f"/proc/{os.getppid()}")
else:
    while not step.is_symlink() or step.exists():
        time.sleep(0.1)
    print("works", flush=True)
    while not pathlib.Path("lost").exists():
        time.sleep(0.1)
    raise SystemExit(9)
"""
    with EmulatedCluster() as cluster:
        job = submit(cluster, tmp_path, MPICH, "chain.sbatch", program, *TWO_NODES, SHORT, **NO_MPI)
        job.wait_for_output("works")
        cluster.lose("n2")
        (tmp_path / "lost").touch()
        job.wait_for_output(f"job {job.number}: end")
        cluster.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        ended = job.end()
    assert (ended.code, ended.output.splitlines()[-1]) == (
        75,
        f"job {job.number}: ended with code 9, and a node does not answer",
    ), str(ended)


def test_chain_ends_when_the_training_does(cluster, tmp_path):
    """The first job says "try again", the second one is done, and the third one is cancelled; the last is another's."""
    program = "import os, sys; sys.exit(75 * (os.environ['SLURM_JOB_ID'] == open('first').read()))"
    options = ("--job-name=chain", "--nodes=1", "--ntasks-per-node=1", SHORT)
    first, *others = [
        submit(cluster, tmp_path, MPICH, "chain.sbatch", program, "--hold", *options, arguments=arguments, **NO_MPI)
        for arguments in ((), (), (), ("other",))
    ]
    (tmp_path / "first").write_text(first.number)
    for job in (*others, first):  # for which the others wait
        cluster.call("scontrol", "release", job.number)
    assert [(ended.state, ended.code) for ended in (job.end() for job in (first, *others))] == [
        ("FAILED", 75),
        ("COMPLETED", 0),
        ("CANCELLED", 0),
        ("COMPLETED", 0),
    ]
    text = f"ends the chain chain with code 0; cancelled: {others[1].number}\n"
    assert text in others[0].end().output


def test_sweep_takes_a_line_for_each_task(cluster, tmp_path):
    """A task that fails, and one without a line, leave the others alone."""
    (tmp_path / "table.csv").write_text("\ufeffrate,seed\r\n0.1,7\r\n0.2,8\r\n0.3,9\r\n")
    (tmp_path / "train.py").write_text(
        "import os, sys; open('result', 'w').write(' '.join(sys.argv[1:])); sys.exit(3 * ('--seed=8' in sys.argv))"
    )
    job = submit(
        cluster,
        tmp_path,
        MPICH,
        "sweep.sbatch",
        "",
        "--array=0-4",  # line 0 has the names
        "--ntasks-per-node=1",
        program_name="table.csv",
        arguments=("train.py", "--epochs", "10"),
        **NO_MPI,
    )
    assert job.codes() == {"0": 2, "1": 0, "2": 3, "3": 0, "4": 2}
    alone = submit(cluster, tmp_path, MPICH, "sweep.sbatch", "", "--array=1", program_name="table.csv", **NO_MPI)
    assert alone.codes() == {"1": 2}
    results = {path.parent.name: path.read_text() for path in tmp_path.glob(f"sweep-{job.number}/*/result")}
    assert results == {str(task): f"--rate=0.{task} --seed={task + 6} --epochs 10" for task in (1, 2, 3)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_container(cluster, tmp_path, library):
    """Here `apptainer exec` runs the program as it is."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text('#!/bin/bash\n[ "$1 $2 $3 $4" = "exec --bind $PWD image.sif" ] || exit 9\nshift 4\nexec "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = submit(cluster, tmp_path, library, "container.sbatch", ADD, *TWO_NODES, IMAGE="image.sif", PATH=path).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["the sum is 3"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_container_of_charliecloud(cluster, tmp_path, library):
    """An image that has nothing but what it sees of this machine: its Python and MPI, and the project."""
    real = shutil.which("ch-run")
    if real is None:
        pytest.skip("needs a mount namespace, and ch-run to make it, of the package charliecloud")
    seen = sorted({"/usr", sys.base_prefix, str(PROJECT)})
    # ch-run shows TMPDIR as /tmp, and binds nothing in it: where the project lies there, it is seen with /tmp.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder, image = Path(name), Path(name) / "image"
        for one in ("/etc", "/proc", "/dev", "/sys", "/tmp", *seen, name):
            Path(f"{image}{one}").mkdir(parents=True, exist_ok=True)
        for link in ("bin", "lib", "lib64"):
            (image / link).symlink_to(f"usr/{link}")
        for file in ("passwd", "group", "hosts", "resolv.conf"):
            (image / "etc" / file).touch()
        binds = " ".join(f"--bind={one}:{one}" for one in seen if not Path(one).is_relative_to("/tmp"))
        (folder / "ch-run").write_text(f'#!/bin/bash\nTMPDIR=/tmp exec {real} {binds} "$@"\n')
        (folder / "ch-run").chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        job = submit(cluster, folder, library, "container.sbatch", ADD, *TWO_NODES, IMAGE=str(image), PATH=path)
        ended = job.end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["the sum is 3"]), str(ended)


def test_container_without_an_image(cluster, tmp_path):
    ended = submit(cluster, tmp_path, MPICH, "container.sbatch", ADD, *TWO_NODES).end()
    assert ended.state == "FAILED"
    assert "IMAGE says which container to take: IMAGE=training.sif sbatch" in ended.output


def test_scaling_over_nodes(cluster, tmp_path):
    """The program says how long it took, by the number of ranks."""
    program = (
        "import os; os.environ['SLURM_PROCID'] == '0' and print('seconds:', 1 + 12 / int(os.environ['SLURM_NTASKS']))"
    )
    ended = submit(cluster, tmp_path, MPICH, "scaling.sbatch", program, "--nodes=3", **NO_MPI).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    (table,) = tmp_path.glob("scaling-*.csv")
    assert [*csv.reader(table.read_text().splitlines())] == [
        ["nodes", "ranks", "seconds", "speedup", "efficiency"],
        ["1", "2", "7.000", "1.00", "1.00"],
        ["2", "4", "4.000", "1.75", "0.88"],
        ["3", "6", "3.000", "2.33", "0.78"],
    ]


def test_scaling_ends_with_a_run_that_fails(cluster, tmp_path):
    ended = submit(cluster, tmp_path, MPICH, "scaling.sbatch", "import sys; sys.exit(4)", *TWO_NODES, **NO_MPI).end()
    assert (ended.state, ended.code) == ("FAILED", 4), str(ended)


def test_healthcheck_and_tuning(cluster, tmp_path):
    (tmp_path / "wrong.json").write_text('{"nodes": [{"facts": {"Python": "0.1"}}]}')
    well, ill, tuned = (
        submit(cluster, tmp_path, library, script, "", *TWO_NODES, program_name=None, arguments=arguments, **variables)
        for library, script, arguments, variables in (
            (OPEN_MPI, "healthcheck.sbatch", (), {}),
            (MPICH, "healthcheck.sbatch", ("--expect", "wrong.json"), {}),
            (MPICH, "tune.sbatch", ("--seconds", "1"), {"MPIDIST_TUNE_DIR": str(tmp_path / "tuned")}),
        )
    )
    ended = well.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert "2 ranks on 2 nodes" in ended.output, str(ended)
    ended = ill.end()
    assert (ended.state, ended.code) == ("FAILED", 1), str(ended)
    nodes = re.search(r"nodes that fail alone: (n\d,n\d); without them: sbatch --exclude=(n\d,n\d)", ended.output)
    assert nodes, str(ended)
    assert nodes[1] == nodes[2], str(ended)
    ended = tuned.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert [path for path in (tmp_path / "tuned").rglob("*") if path.is_file()]


def test_healthcheck_wrong_option_blames_no_node(cluster, tmp_path):
    arguments = ("--bogus",)
    ended = submit(
        cluster, tmp_path, MPICH, "healthcheck.sbatch", "", *TWO_NODES, program_name=None, arguments=arguments
    ).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert "unrecognized arguments: --bogus" in ended.output
    assert "nodes that fail" not in ended.output


def test_interactive_allocation(cluster, tmp_path):
    (tmp_path / "program.py").write_text(ADD)
    shell = ["bash", str(SCRIPTS / "interactive.sh"), "--quiet", *TWO_NODES]
    for command, typed in (([*shell, "--", "program.py"], ""), (shell, "run_ranks python program.py\nexit\n")):
        done = ran(command, env=job_environment(cluster, MPICH), cwd=tmp_path, input=typed)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:] == ["the sum is 3"]


def test_script_without_the_common_part(cluster, tmp_path):
    script = Path(shutil.copy(SCRIPTS / "train.sbatch", tmp_path))
    ended = submit(cluster, tmp_path, MPICH, script, ADD, *TWO_NODES).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert ended.output.startswith(f"there is no {tmp_path}/env.sh: copy env.sh beside the script, or JOB_ENV=")


def test_common_part_that_is_named(cluster, tmp_path):
    script = Path(shutil.copy(SCRIPTS / "train.sbatch", tmp_path))
    named = str(SCRIPTS / "env.sh")
    ended = submit(cluster, tmp_path, MPICH, script, "print(1)", *TWO_NODES, JOB_ENV=named, **NO_MPI).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["1", "1"])


def test_folder_with_a_space(cluster, tmp_path):
    """Slurm separates the path of a job script and the arguments by a space, too."""
    folder = tmp_path / "my scripts"
    folder.mkdir()
    for name in ("train.sbatch", "env.sh"):
        shutil.copy(SCRIPTS / name, folder)
    script, program = folder / "train.sbatch", "import sys; print(sys.argv[1:])"
    ended = submit(cluster, tmp_path, MPICH, script, program, *TWO_NODES, arguments=("a b", "c"), **NO_MPI).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["['a b', 'c']"] * 2), str(ended)


def test_environment_without_mpi4py(cluster, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    variables = {"VIRTUAL_ENV": "/nowhere", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = submit(cluster, tmp_path, MPICH, "train.sbatch", ADD, *TWO_NODES, **variables).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert "python -m mpi4py fails: load modules and mpidist's packages in " in ended.output
