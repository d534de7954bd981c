"""The job scripts: which ranks they start, and how they are written. A stand-in answers for srun."""

import re
from pathlib import Path

import pytest
from jobs.failing import ran, stand_in

pytestmark = pytest.mark.no_mpi

FOLDER = Path(__file__).parents[2] / "slurm"
SCRIPT = FOLDER / "roles.sbatch"
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "JOB_ENV": str(FOLDER / "env.sh"),
    "MPI_TYPE": "pmi2",
    "VIRTUAL_ENV": "/nowhere",
}
# What `scontrol show job` prints: of an array all its tasks, and of a heterogeneous job all components.
FACTS = "JobId=7 {}JobName=mpidist Requeue=1 Restarts={} BatchFlag=1 NumNodes=2 WorkDir=/home {}"
TWO_COMPONENTS = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "4", "SLURM_NTASKS_HET_GROUP_1": "2"}
CPUS = {"SLURM_CPUS_PER_TASK_HET_GROUP_0": "10", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "9"}


@pytest.mark.parametrize(
    ("variables", "said", "started"),
    [
        (TWO_COMPONENTS, "workers: 4, parameter servers: 2", "2 1 1: --het-group=0,1 --mpi=pmi2"),
        (TWO_COMPONENTS | CPUS, "workers: 4, parameter servers: 2", "2 9 9: --het-group=0,1 --mpi=pmi2"),
        ({"SLURM_NTASKS": "5"}, "workers: 4, parameter servers: 1", "1 1 1: --mpi=pmi2"),
        ({"SLURM_NTASKS": "5", "NUM_PS": "3"}, "workers: 2, parameter servers: 3", "3 1 1: --mpi=pmi2"),
    ],
    ids=["two components", "two components with cores", "plain", "plain with NUM_PS"],
)
def test_roles_of_a_job(tmp_path, variables, said, started):
    stand_in(tmp_path, "srun", 'echo "$NUM_PS $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS: $*"')
    say_facts(tmp_path, "HetJobId=7 " * ("SLURM_HET_SIZE" in variables))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **JOB, **variables}
    command = ["bash", str(SCRIPT), "train.py", "--name", "two words"]
    done = ran(command, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [said, f"{started} --kill-on-bad-exit=1 python train.py --name two words"]


def say_facts(folder, kind="", restarts="0", tres=""):
    """Let a stand-in for scontrol describe the job, and repeat its other calls."""
    other = FACTS.format("ArrayTaskId=4 ", "9", "TresPerNode=gres:gpu:2").replace("=7", "=8")
    facts = FACTS.format(kind, restarts, tres)
    stand_in(folder, "scontrol", f'case $1 in show) echo "{other}\n{facts}";; *) echo "scontrol $*";; esac')


@pytest.mark.parametrize(
    ("code", "answer", "attempt", "is_requeued"),
    [
        (75, "exit 0", "0", True),
        (75, "exit 0", "3", True),
        (75, "exit 0", "20", False),
        (138, "exit 0", "0", True),  # by USR1, before the program handles it
        (1, "exit 0", "0", False),
        (1, "exit 124", "0", True),  # a node is lost
        (1, "echo srun: error: Task launch for StepId=7.1 failed on node n2: Connection failure; exit 233", "0", True),
        (1, "echo srun: error: n1: task 0: Exited with exit code 2; exit 2", "0", False),
        (0, "exit 124", "0", False),
    ],
)
def test_requeue_after_exit_code_75_or_a_lost_node(tmp_path, code, answer, attempt, is_requeued):
    """The count of another job's restarts is none of this one's."""
    srun = f'case "$*" in *python*) exit {code};; *"-N 2 -n 2"*/bin/true) {answer};; esac'
    done = requeue(tmp_path, srun, {"SLURM_RESTART_COUNT": "25"}, restarts=attempt)
    assert done.returncode == (75 if is_requeued else code), done.stderr
    assert ("scontrol requeue 7\n" in done.stdout) == is_requeued
    assert ("not requeued, as all restarts are used (MAX_RESTARTS=20)" in done.stdout) == (attempt == "20")


@pytest.mark.parametrize(
    ("kind", "job"), [("ArrayJobId=7 ArrayTaskId=3 ", "7_3"), ("", "7")], ids=["array", "inherited"]
)
def test_requeue_of_an_array_is_of_one_task(tmp_path, kind, job):
    """The last task has the job ID of the array, with which `scontrol requeue` would end the others, too."""
    done = requeue(tmp_path, "exit 75", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, kind=kind)
    assert done.returncode == 75, done.stderr
    assert f"scontrol requeue {job}\n" in done.stdout


@pytest.mark.parametrize("tres", ["TresPerNode=gres:gpu:2", "TresPerJob=gres:lustre:1"])
def test_variables_of_another_job_do_not_reach_ranks(tmp_path, tres):
    """A job that was submitted from another one has its variables; `sbatch --export=NONE` sets the last one."""
    others = {"SLURM_HET_SIZE": "2", "SLURM_GPUS_PER_NODE": "2", "SLURM_RESTART_COUNT": "4", "SLURM_EXPORT_ENV": "NONE"}
    done = requeue(tmp_path, 'env | grep ^SLURM_; echo "srun $*"', others, tres=tres, restarts="1")
    assert done.returncode == 0, done.stderr
    assert ("SLURM_GPUS_PER_NODE=2\n" in done.stdout) == ("gpu" in tres)
    assert "SLURM_HET_SIZE" not in done.stdout
    assert "srun --mpi=pmi2 --kill-on-bad-exit=1 python train.py" in done.stdout
    assert "SLURM_RESTART_COUNT=1\n" in done.stdout
    assert "SLURM_EXPORT_ENV=ALL\n" in done.stdout


@pytest.mark.parametrize(("code", "are_nodes_asked"), [(0, False), (1, True), (2, False)])
def test_nodes_are_not_to_blame_for_wrong_arguments(tmp_path, code, are_nodes_asked):
    """As `--expect` with a file that is not there, which `mpidist doctor` refuses with 2."""
    done = requeue(tmp_path, f"exit {code}", {"SLURM_JOB_NODELIST": "n1"}, "healthcheck.sbatch")
    assert done.returncode == code, done.stderr
    assert ("nodes that fail alone: " in done.stdout) == are_nodes_asked


@pytest.mark.parametrize("is_shell", [False, True])
@pytest.mark.parametrize(
    ("variables", "option"), [({}, ""), (TWO_COMPONENTS, "--het-group=0,1 ")], ids=["plain", "het"]
)
def test_interactive_allocation_without_a_number_of_tasks(tmp_path, variables, option, is_shell):
    stand_in(tmp_path, "srun", 'echo "$*"')
    stand_in(tmp_path, "salloc", 'shift; exec "$@"')
    say_facts(tmp_path, "HetJobId=7 " * ("SLURM_HET_SIZE" in variables))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **JOB, **variables}
    command = ["bash", str(SCRIPT.with_name("interactive.sh")), "--nodes=2", *([] if is_shell else ["--", "train.py"])]
    done = ran(command, env=environment, cwd=tmp_path, input="run_ranks python train.py\n" * is_shell)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [f"{option}--mpi=pmi2 --kill-on-bad-exit=1 python train.py"]


def requeue(folder, srun, variables, script="requeue.sbatch", **facts):
    """Run a script, with stand-ins for srun and scontrol."""
    say_facts(folder, **facts)
    for name, body in {"srun": srun, "sleep": ""}.items():
        stand_in(folder, name, body)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **JOB, "SLURM_NTASKS": "4", **variables}
    command = ["bash", str(SCRIPT.with_name(script)), "train.py"]
    return ran(command, env=environment, cwd=folder)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sbatch")), ids=lambda script: script.name)
def test_scripts_outside_a_job_exit_with_2(tmp_path, script):
    environment = {"PATH": "/usr/bin:/bin", "JOB_ENV": JOB["JOB_ENV"], "IMAGE": "image.sif"}
    command = ["bash", str(script), "train.py"]
    done = ran(command, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{script} is for sbatch, and this is no job of Slurm: sbatch {script} ...\n"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.s*")), ids=lambda script: script.name)
def test_how_scripts_are_written(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 120


def test_jobs_of_a_chain_have_a_name_of_their_own():
    """It is what singleton waits for, and scancel ends."""
    names = {
        script.stem: re.findall("^#SBATCH --job-name=(.*)$", script.read_text(), re.M) for script in FOLDER.iterdir()
    }
    assert names.pop("chain") == ["mpidist-chain"]
    assert ["mpidist-chain"] not in names.values()
