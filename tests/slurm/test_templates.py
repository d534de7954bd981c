"""Job scripts for GPUs, chains, sweeps, containers, scaling and checks, submitted to a real Slurm."""

import csv
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from jobs.failing import ran
from mpi_session import HANG_SECONDS
from slurm.batch_jobs import LIBRARIES, PROJECT, job_environment, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(5 * HANG_SECONDS)]

SCRIPTS = PROJECT / "slurm"
MPICH, OPEN_MPI = LIBRARIES
NO_MPI = {"MPI_TYPE": "pmi2"}  # of programs without MPI: nothing has to be found out
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
SHORT = "--time=10"
ADD = """
import mpidist

with mpidist.MultiWorkerMirroredStrategy() as strategy:
    total = strategy.reduce("sum", strategy.topology.rank + 1)
    if strategy.is_chief:
        print("the sum is", total)
"""


def test_each_rank_has_a_gpu(cluster: EmulatedCluster, tmp_path: Path) -> None:
    program = "import os; print(os.environ['SLURM_LOCALID'], 'of', os.environ['CUDA_VISIBLE_DEVICES'])"
    ended = submit(cluster, tmp_path, MPICH, "train_gpu.sbatch", program, **NO_MPI).end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert sorted(ended.output.splitlines()[1:]) == ["0 of 0,1"] * 2 + ["1 of 0,1"] * 2


def test_more_ranks_than_gpus(cluster: EmulatedCluster, tmp_path: Path) -> None:
    options = ("--nodes=1", "--ntasks-per-node=3")
    ended = submit(cluster, tmp_path, MPICH, "train_gpu.sbatch", "print('began')", *options, **NO_MPI).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    text = "a node has 3 ranks and 2 GPUs: needed is a GPU for each rank, by --gpus-per-node=3"
    assert ended.output.splitlines()[1:] == [text]


def test_chain_goes_on_after_the_loss_of_a_node(tmp_path: Path) -> None:
    """Rank 1 has ended well on the node that is lost; rank 0 fails before Slurm misses the node."""
    program = """
import os, pathlib, time
if os.environ["SLURM_PROCID"] == "0":
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
        ended = job.end()
    assert (ended.code, ended.output.splitlines()[-1]) == (
        75,
        f"job {job.number}: ended with code 9, and a node does not answer",
    ), str(ended)


def test_chain_ends_when_the_training_does(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """The first job says "try again", the second one is done, and the third one is cancelled."""
    program = "import os, sys; sys.exit(75 * (os.environ['SLURM_JOB_ID'] == open('first').read()))"
    options = ("--job-name=chain", "--nodes=1", "--ntasks-per-node=1", SHORT)
    first, *others = [
        submit(cluster, tmp_path, MPICH, "chain.sbatch", program, "--hold", *options, **NO_MPI) for _ in range(3)
    ]
    (tmp_path / "first").write_text(first.number)
    for job in (first, *others):
        cluster.call("scontrol", "release", job.number)
    assert [(ended.state, ended.code) for ended in (job.end() for job in (first, *others))] == [
        ("FAILED", 75),
        ("COMPLETED", 0),
        ("CANCELLED", 0),
    ]
    assert "ends the chain chain with code 0" in others[0].end().output


def test_sweep_takes_a_line_for_each_task(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """A task that fails, and one without a line, leave the others alone."""
    (tmp_path / "table.csv").write_text("rate,seed\r\n0.1,7\r\n0.2,8\r\n0.3,9\r\n")
    (tmp_path / "train.py").write_text(
        "import os, sys; open('result', 'w').write(' '.join(sys.argv[1:])); sys.exit(3 * ('--seed=8' in sys.argv))"
    )
    job = submit(
        cluster,
        tmp_path,
        MPICH,
        "sweep.sbatch",
        "",
        "--array=1-4",
        "--ntasks-per-node=1",
        program_name="table.csv",
        arguments=("train.py", "--epochs", "10"),
        **NO_MPI,
    )
    assert job.codes() == {"1": 0, "2": 3, "3": 0, "4": 2}
    results = {path.parent.name: path.read_text() for path in tmp_path.glob(f"sweep-{job.number}/*/result")}
    assert results == {str(task): f"--rate=0.{task} --seed={task + 6} --epochs 10" for task in (1, 2, 3)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_container(cluster: EmulatedCluster, tmp_path: Path, library: str) -> None:
    """Here `apptainer exec` runs the program as it is."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text('#!/bin/bash\n[ "$1 $2 $3 $4" = "exec --bind $PWD image.sif" ] || exit 9\nshift 4\nexec "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = submit(cluster, tmp_path, library, "container.sbatch", ADD, *TWO_NODES, IMAGE="image.sif", PATH=path).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["the sum is 3"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_container_of_charliecloud(cluster: EmulatedCluster, tmp_path: Path, library: str) -> None:
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


def test_container_without_an_image(cluster: EmulatedCluster, tmp_path: Path) -> None:
    ended = submit(cluster, tmp_path, MPICH, "container.sbatch", ADD, *TWO_NODES).end()
    assert ended.state == "FAILED"
    assert "IMAGE says which container to take: IMAGE=training.sif sbatch" in ended.output


def test_scaling_over_nodes(cluster: EmulatedCluster, tmp_path: Path) -> None:
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


def test_scaling_ends_with_a_run_that_fails(cluster: EmulatedCluster, tmp_path: Path) -> None:
    ended = submit(cluster, tmp_path, MPICH, "scaling.sbatch", "import sys; sys.exit(4)", *TWO_NODES, **NO_MPI).end()
    assert (ended.state, ended.code) == ("FAILED", 4), str(ended)


def test_healthcheck_and_tuning(cluster: EmulatedCluster, tmp_path: Path) -> None:
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


def test_interactive_allocation(cluster: EmulatedCluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ADD)
    shell = ["bash", str(SCRIPTS / "interactive.sh"), "--quiet", *TWO_NODES]
    for command, typed in (([*shell, "--", "program.py"], ""), (shell, "run_ranks python program.py\nexit\n")):
        done = ran(command, env=job_environment(cluster, MPICH), cwd=tmp_path, input=typed)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:] == ["the sum is 3"]


def test_script_without_the_common_part(cluster: EmulatedCluster, tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPTS / "train.sbatch", tmp_path))
    ended = submit(cluster, tmp_path, MPICH, script, ADD, *TWO_NODES).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert ended.output.startswith(f"there is no {tmp_path}/env.sh: copy env.sh beside the job script, or JOB_ENV=")


def test_common_part_that_is_named(cluster: EmulatedCluster, tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPTS / "train.sbatch", tmp_path))
    named = str(SCRIPTS / "env.sh")
    ended = submit(cluster, tmp_path, MPICH, script, "print(1)", *TWO_NODES, JOB_ENV=named, **NO_MPI).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["1", "1"])


def test_folder_with_a_space(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """Slurm separates the path of a job script and the arguments by a space, too."""
    folder = tmp_path / "my scripts"
    folder.mkdir()
    for name in ("train.sbatch", "env.sh"):
        shutil.copy(SCRIPTS / name, folder)
    script, program = folder / "train.sbatch", "import sys; print(sys.argv[1:])"
    ended = submit(cluster, tmp_path, MPICH, script, program, *TWO_NODES, arguments=("a b", "c"), **NO_MPI).end()
    assert (ended.state, ended.output.splitlines()[1:]) == ("COMPLETED", ["['a b', 'c']"] * 2), str(ended)


def test_environment_without_mpi4py(cluster: EmulatedCluster, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    variables = {"VIRTUAL_ENV": "/nowhere", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = submit(cluster, tmp_path, MPICH, "train.sbatch", ADD, *TWO_NODES, **variables).end()
    assert (ended.state, ended.code) == ("FAILED", 2), str(ended)
    assert "python -m mpi4py fails: load modules and an environment with mpidist in " in ended.output
