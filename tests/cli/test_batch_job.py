"""`python -m mpidist sbatch`: which job script it takes, and with what; stand-ins answer for Slurm."""

import shlex
from pathlib import Path

import pytest
from jobs.failing import stand_in

import mpidist
from mpidist.__main__ import run_command

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

SCRIPTS = Path(mpidist.__file__).parent / "slurm"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder with programs and Slurm's commands, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mpidist.cli.batch_job.sys.executable", str(tmp_path / "python"))
    monkeypatch.delenv("MPI_TYPE", raising=False)
    (tmp_path / "train.py").touch()
    stand_in(tmp_path, "python", "echo MPICH Version: 5")
    stand_in(tmp_path, "srun", "echo MPI plugin types are...; echo pmi2; echo pmix >&2")
    return tmp_path


def would_submit(capsys, *arguments):
    """Return the words of the command that --dry-run prints."""
    assert run_command(["sbatch", "--dry-run", *arguments]) == 0
    return [word for word in shlex.split(capsys.readouterr().out) if not word.startswith("VIRTUAL_ENV=")]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("arguments", "options", "script"),
    [
        ("", "", "train"),
        ("--nodes 8 --ntasks-per-node 4 --time 1-12", "--nodes=8 --ntasks-per-node=4 --time=1-12", "train"),
        ("--gpus-per-node 4", "--ntasks-per-node=4 --gpus-per-node=4", "train"),
        ("--requeue --time 0", "--time=0", "requeue"),
        ("--requeue --time 00:06:01", "--time=00:06:01", "requeue"),
        ("--requeue --time 3:00 --signal=USR1@90", "--time=3:00 --signal=USR1@90", "requeue"),
        ("--gpus-per-node 4 --requeue", "--ntasks-per-node=4 --gpus-per-node=4", "requeue"),
        ("--nodes 3 --ps 2 --time 5", "--nodes=3 --time=5 : --nodes=1 --ntasks-per-node=2 --time=5", "roles"),
        ("-p gpu -A ab12 --qos=high", "--partition=gpu --account=ab12 --qos=high", "train"),
        ("--nodes 2 --mem=64G --exclusive", "--nodes=2 --mem=64G --exclusive", "train"),
        ("--nodes 2 --ntasks=8 --gpus=4", "--nodes=2 --ntasks=8 --gpus=4", "train"),
    ],
)
def test_sbatch_finds_job_script(capsys, arguments, options, script):
    words = would_submit(capsys, *arguments.split(), "train.py", "--nodes", "two words")
    path = SCRIPTS / f"{script}.sbatch"
    assert path.is_file()
    assert words == ["MPI_TYPE=pmi2", "sbatch", *options.split(), str(path), "train.py", "--nodes", "two words"]


@pytest.mark.parametrize(
    ("library", "listed", "chosen"),
    [
        ("echo Open MPI v5", "echo pmi2; echo pmix", ["MPI_TYPE=pmix"]),
        ("echo Open MPI v5", "echo pmix_v3; echo pmix_v4", ["MPI_TYPE=pmix_v4"]),
        ("echo CRAY MPICH", "echo cray_shasta", ["MPI_TYPE=cray_shasta"]),
        ("echo MPICH", "exit 1", ["MPI_TYPE=pmi2"]),
        (
            "echo MPICH Device: ch4:ucx,ofi",
            "echo pmi2",
            ["MPI_TYPE=pmi2", "MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=^sockets"],
        ),
        ("exit 1", "echo pmix", []),
    ],
)
def test_how_srun_starts_the_library(tools, capsys, library, listed, chosen):
    stand_in(tools, "python", library)
    stand_in(tools, "srun", listed)
    words = would_submit(capsys, "train.py")
    assert words[: words.index("sbatch")] == chosen


def test_sbatch_submits(tools, capfd, monkeypatch):
    stand_in(tools, "sbatch", 'echo "$MPI_TYPE $*"; exit 7')
    monkeypatch.setenv("MPI_TYPE", "special")
    assert run_command(["sbatch", "train.py", "-x"]) == 7
    assert capfd.readouterr().out == f"special {SCRIPTS / 'train.sbatch'} train.py -x\n"


@pytest.mark.parametrize(("job", "left"), [("3", "SLURM_CONF=c"), ("", "SLURM_CONF=c SLURM_DISTRIBUTION=cyclic")])
def test_sbatch_from_a_job_gets_no_variables_of_the_job(tools, capfd, monkeypatch, job, left):
    stand_in(tools, "sbatch", "/usr/bin/env | /usr/bin/grep ^SLURM_ | /usr/bin/sort")
    for name, value in {"SLURM_CONF": "c", "SLURM_DISTRIBUTION": "cyclic", "SLURM_JOB_ID": job}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert run_command(["sbatch", "train.py"]) == 0
    assert capfd.readouterr().out.split() == left.split()


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "needed is the program of the ranks"),
        ("missing.py", "there is no file missing.py in "),
        ("--mem 64G train.py", "there is no file 64G in "),
        ("-w node7 train.py", "options of Slurm's sbatch are written as in --mem=64G"),
        (
            "--gpus-per-node 2 --ntasks-per-node 4 train.py",
            "4 ranks and 2 GPUs per node: needed is a GPU for each rank",
        ),
        ("--requeue --ps 1 train.py", "--requeue is for ranks in lock step"),
        (
            "--requeue --time 6 train.py",
            "--time 6 is 360 s, and Slurm may send the signal at which the ranks save 360 s ",
        ),
        ("--requeue --time 0-0:2:30 --signal=USR1@90 train.py", "--time 0-0:2:30 is 150 s, and Slurm may send the "),
        ("train.py", "there is no sbatch on PATH"),
    ],
)
def test_sbatch_refuses_wrong_arguments(capsys, arguments, text):
    assert run_command(["sbatch", *arguments.split()]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--nodes 0", "--ps -1", "--ntasks-per-node many", "--time soon"])
def test_numbers_that_cannot_be(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        run_command(["sbatch", *arguments.split(), "train.py"])
    assert arguments.split()[1] in capsys.readouterr().err


@pytest.mark.usefixtures("tools")
def test_sbatch_option_with_a_space_is_passed_on(capsys):
    options = ["--job-name=my run", "--mem=64G", "--nodes=2", "--comment=for the page"]
    words = would_submit(capsys, "--requeue", *options, "train.py", "--title=a b")
    assert words[1:6] == ["sbatch", "--nodes=2", options[0], options[1], options[3]]
    assert words[7:] == ["train.py", "--title=a b"]


@pytest.mark.usefixtures("tools")
def test_option_behind_the_program_is_warned_of(capsys):
    assert run_command(["sbatch", "--dry-run", "train.py", "--epochs", "3", "--nodes=8", "-p", "x"]) == 0
    assert "--nodes=8, -p behind train.py goes to the program" in capsys.readouterr().err
    assert run_command(["sbatch", "--dry-run", "--nodes", "8", "train.py", "--epochs", "3"]) == 0
    assert not capsys.readouterr().err


def test_slurm_that_cannot_start_the_library(tools, capsys):
    stand_in(tools, "srun", "echo pmix")
    assert run_command(["sbatch", "train.py"]) == 2
    assert "needs `srun --mpi=pmi2`, which `srun --mpi=list` does not list" in capsys.readouterr().err


def test_sbatch_writes_all_job_scripts_once(tmp_path, capsys):
    for status in (0, 2):
        assert run_command(["sbatch", "--write-scripts", str(tmp_path / "jobs")]) == status
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {path.name for path in SCRIPTS.iterdir()}
    assert "are not overwritten" in capsys.readouterr().err
