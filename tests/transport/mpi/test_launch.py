"""One world of N ranks, or N worlds of one."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from jobs.failing import PROJECT
from mpi_session import clean_environment

from mpidist.errors import TopologyError
from mpidist.transport.mpi.launch import check_before_init, check_launch, choose_netmod

pytestmark = pytest.mark.no_mpi

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
COMMAND = ["/env/bin/python", "train.py", "--name", "two words"]
LINE = "/env/bin/python train.py --name 'two words'"

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ofi\nMPICH configure:    --with-device=ch4:ofi"
MPICH_WITH_PMIX = MPICH + " --with-pmix=/usr"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\x00"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS\n"
MVAPICH = "MVAPICH Version      :\t4.0\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.20 (ANL base 3.4a2)\nMPI BUILD INFO : Wed"
OTHER = "Fujitsu MPI Library 4.0.0"

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "9", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
PRRTE = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-n1-1@1"}


def recorded(path: str) -> dict[str, Any]:
    return json.loads((FIXTURES / path).read_text())


def slurm_tasks(shape: str) -> list[dict[str, str]]:
    return recorded(f"slurm-env/{shape}.json")["tasks"]


def mpi_ranks(name: str) -> list[dict[str, str]]:
    return [rank["env"] for rank in recorded(f"mpi-env/{name}.json")["ranks"]]


def error_of(environ: dict[str, str], library: str, command: list[str] = COMMAND) -> str:
    with pytest.raises(TopologyError) as error:
        check_launch(environ, 1, library, command)
    return str(error.value)


@pytest.mark.parametrize(
    ("library", "start"),
    [
        (MPICH, "`srun --mpi=pmi2 -N 2 -n 4 "),
        (INTEL, "`srun --mpi=pmi2 -N 2 -n 4 "),
        (MVAPICH, "`srun --mpi=pmi2 -N 2 -n 4 "),
        (OPEN_MPI, "`srun --mpi=pmix -N 2 -n 4 "),
        (CRAY, "`srun --mpi=cray_shasta -N 2 -n 4 "),
        (OTHER, "`srun --mpi=TYPE -N 2 -n 4 "),
    ],
)
def test_singletons_in_a_step_name_the_right_srun(library: str, start: str) -> None:
    """users.md 2.2, singletons; 2.3, the table."""
    for environ in slurm_tasks("2nodes-4tasks-none"):
        text = error_of(environ, library)
        assert f"{start}{LINE}`" in text
        assert "srun --mpi=none started 4 ranks (SLURM_STEP_NUM_TASKS=4)" in text
        assert f"inside the allocation with `mpiexec -n 4 {LINE}`" in text


def test_open_mpi_under_pmi2_needs_pmix() -> None:
    """users.md 2.3, second row."""
    for environ in slurm_tasks("2nodes-4tasks-pmi2"):
        text = error_of(environ, OPEN_MPI)
        assert "srun --mpi=pmi2 started 4 ranks (PMI_SIZE=4)" in text
        assert f"start with `srun --mpi=pmix -N 2 -n 4 {LINE}`" in text


def test_library_without_the_right_plugin_is_sent_to_mpiexec() -> None:
    """users.md 2.3: a plugin alone does not help every build."""
    for environ in slurm_tasks("2nodes-4tasks-pmix"):
        text = error_of(environ, OPEN_MPI)
        assert "this build of the library does not speak that" in text
        assert f"inside the allocation use `mpiexec -n 4 {LINE}`" in text
        assert "start with `srun" not in text


def test_unknown_library_is_sent_to_the_list_of_plugins() -> None:
    """users.md 2.3, (a)."""
    assert "`srun --mpi=list` shows each TYPE" in error_of(STEP, OTHER)


@pytest.mark.parametrize(
    ("name", "library", "variable", "owner"),
    [
        ("ompi-mpirun-2hosts-4ranks", MPICH, "OMPI_COMM_WORLD_SIZE=4", "MPICH"),
        ("ompi-mpirun-2hosts-4ranks", INTEL, "OMPI_COMM_WORLD_SIZE=4", "Intel MPI"),
        ("mpich-mpirun-2hosts-4ranks", OPEN_MPI, "PMI_SIZE=4", "Open MPI"),
        ("mpich-mpirun-2hosts-4ranks", MPICH, "PMI_SIZE=4", "MPICH"),
    ],
)
def test_mpiexec_of_another_mpi_names_the_right_one(name: str, library: str, variable: str, owner: str) -> None:
    """users.md 2.2, launcher of another MPI."""
    for environ in mpi_ranks(name):
        text = error_of(environ, library)
        assert f"mpiexec started 4 ranks ({variable})" in text
        assert f"start with `mpiexec -n 4 {LINE}`, where mpiexec is that of {owner}" in text


@pytest.mark.parametrize(
    ("environ", "num_ranks"),
    [
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "5"}, 5),
        ({"PMI_SIZE": "6"}, 6),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-1@1"}, 2),
        # mpiexec in an allocation: the step is that of its daemons.
        ({**STEP, **HYDRA, "PMI_SIZE": "8"}, 8),
        ({**STEP, **PRRTE}, 2),
    ],
)
def test_any_launcher_with_several_ranks_is_seen(environ: dict[str, str], num_ranks: int) -> None:
    """users.md 2.2, launcher of another MPI."""
    assert f"mpiexec started {num_ranks} ranks" in error_of(environ, OTHER)


def test_error_says_how_to_run_separate_programs() -> None:
    """users.md 2.2: the step may hold single programs on purpose."""
    text = error_of({**STEP, **HYDRA}, OPEN_MPI)
    unset = "-u SLURM_STEP_NUM_TASKS -u PMI_SIZE -u MPI_LOCALNRANKS -u PMI_FD"
    assert f"(If separate programs are meant: `env {unset} python ...`.)" in text
    alone = {name: value for name, value in {**STEP, **HYDRA}.items() if name not in unset.split()}
    check_launch(alone, 1, OPEN_MPI, COMMAND)


@pytest.mark.parametrize(("library", "companion"), [(MPICH, "hydra_pmi_proxy"), (OPEN_MPI, "ompi_info")])
def test_mpiexec_beside_the_interpreter_is_named_if_it_is_the_librarys(
    tmp_path: pathlib.Path, library: str, companion: str
) -> None:
    """users.md 2.2, which mpiexec; 2.3: both wheels in one environment."""
    (tmp_path / "mpiexec").touch()
    python = str(tmp_path / "python")
    environ = {"PMI_SIZE": "4"}
    assert f"{tmp_path}/mpiexec" not in error_of(environ, library, [python, "a.py"])
    (tmp_path / companion).touch()
    assert f"`{tmp_path}/mpiexec -n 4 {python} a.py`" in error_of(environ, library, [python, "a.py"])


def test_command_without_interpreter_gets_one() -> None:
    """users.md 2.2: a line to copy."""
    assert "-n 4 python train.py -v`" in error_of(STEP, MPICH, ["train.py", "-v"])


SANE = [
    ("plain python", {}),
    ("mpiexec -n 1 of MPICH", {**HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}),
    ("mpiexec -n 1 of Open MPI", {**PRRTE, "OMPI_COMM_WORLD_SIZE": "1"}),
    ("srun -n 1", {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}),
    ("mpiexec -n 1 of Open MPI, its daemons on two nodes", {**STEP, **PRRTE, "OMPI_COMM_WORLD_SIZE": "1"}),
    ("mpiexec -n 1 of MPICH in a step", {**STEP, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}),
    ("a shell of salloc", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2"}),
    ("another's variable without sense", {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": ""}),
]


@pytest.mark.parametrize("library", [MPICH, OPEN_MPI, INTEL, OTHER])
@pytest.mark.parametrize("environ", [case[1] for case in SANE], ids=[case[0] for case in SANE])
def test_sane_world_of_one_passes(library: str, environ: dict[str, str]) -> None:
    """api.md section 1: a group of one is legal everywhere."""
    check_launch(environ, 1, library, COMMAND)
    check_before_init(environ, library, COMMAND)


@pytest.mark.parametrize(
    ("library", "environ"),
    [
        # A rank of Open MPI starts `mpiexec -n 1` of MPICH, and the other way round.
        (MPICH, {**PRRTE, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}),
        (OPEN_MPI, {**HYDRA, **PRRTE, "OMPI_COMM_WORLD_SIZE": "1"}),
        # MPI_Comm_spawn of one rank, from a rank that srun started.
        (MPICH, {**STEP, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "PMI_SPAWNED": "1"}),
    ],
)
def test_world_of_one_started_by_a_rank_passes(library: str, environ: dict[str, str]) -> None:
    """api.md section 1: a group of one is legal everywhere."""
    check_launch(environ, 1, library, COMMAND)


def test_one_task_of_slurm_passes() -> None:
    """api.md section 1, `srun -n 1`."""
    for environ in slurm_tasks("1node-1task"):
        check_launch(environ, 1, MPICH, COMMAND)


@pytest.mark.parametrize("shape", sorted(path.stem for path in (FIXTURES / "slurm-env").iterdir()))
@pytest.mark.parametrize("size", [2, 3, 4, 32])
def test_world_of_several_ranks_is_never_questioned(shape: str, size: int) -> None:
    """A step may hold several programs."""
    for environ in slurm_tasks(shape):
        check_launch(environ, size, MPICH, COMMAND)


def test_forgotten_srun_is_a_warning_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """users.md 2.2, forgot srun."""
    batch = recorded("slurm-env/2nodes-4tasks-pmi2.json")["batch"]
    with caplog.at_level(logging.WARNING, "mpidist"):
        check_launch(batch, 1, OPEN_MPI, COMMAND)
    assert [record.getMessage() for record in caplog.records] == [
        f"r0 | one rank in a Slurm job of 4 tasks; all of them: srun --mpi=pmix -N 2 -n 4 {LINE}"
    ]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
    ],
)
def test_one_rank_that_was_asked_for_logs_nothing(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """users.md 2.2, forgot srun: only then."""
    with caplog.at_level(logging.DEBUG, "mpidist"):
        check_launch(environ, 1, MPICH, COMMAND)
    assert not caplog.records


def test_pmix_launcher_is_refused_before_mpich_aborts() -> None:
    """users.md 2.3, first row, pmix."""
    for environ in [*mpi_ranks("ompi-mpirun-2hosts-4ranks"), *slurm_tasks("2nodes-4tasks-pmix")]:
        with pytest.raises(TopologyError, match="started 4 ranks"):
            check_before_init(environ, MPICH, COMMAND)


@pytest.mark.parametrize("library", [MPICH_WITH_PMIX, OPEN_MPI, INTEL, OTHER])
def test_libraries_that_may_speak_pmix_are_left_to_start(library: str) -> None:
    """users.md 2.3, second row, pmix."""
    for environ in [*mpi_ranks("ompi-mpirun-2hosts-4ranks"), *slurm_tasks("2nodes-4tasks-pmix")]:
        check_before_init(environ, library, COMMAND)


def test_mpich_under_its_own_launchers_is_left_to_start() -> None:
    """users.md 2.3, first row, pmi2."""
    own = [*mpi_ranks("mpich-mpirun-2hosts-4ranks"), *slurm_tasks("2nodes-4tasks-pmi2")]
    within_open_mpi = {**PRRTE, **HYDRA}
    for environ in [*own, within_open_mpi]:
        check_before_init(environ, MPICH, COMMAND)


def test_module_imports_no_mpi() -> None:
    """api.md section 1: importing starts nothing."""
    code = "import sys, mpidist.transport.mpi.launch; sys.exit('mpi4py.MPI' in sys.modules)"
    root = str(pathlib.Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": root})


MPICH_OF_TWO_NETMODS = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
NETMOD = "MPIR_CVAR_CH4_NETMOD"
SRUN = {**STEP, "PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "9"}


@pytest.mark.parametrize("step", [SRUN, {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}])
def test_netmod_that_pmi2_of_slurm_carries(step: dict[str, str]) -> None:
    environ = dict(step)
    choose_netmod(environ, MPICH_OF_TWO_NETMODS)
    assert environ == {**step, NETMOD: "ofi"}


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({**SRUN, NETMOD: "ucx"}, MPICH_OF_TWO_NETMODS),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, MPICH_OF_TWO_NETMODS),
        ({**STEP, **HYDRA}, MPICH_OF_TWO_NETMODS),
        (HYDRA, MPICH_OF_TWO_NETMODS),
        ({}, MPICH_OF_TWO_NETMODS),
        (SRUN, MPICH),
        (SRUN, INTEL),
        (SRUN, CRAY),
        (SRUN, OPEN_MPI),
    ],
    ids=[
        "the user's",
        "one node",
        "mpiexec in a job",
        "mpiexec",
        "alone",
        "libfabric alone",
        "Intel",
        "Cray",
        "Open MPI",
    ],
)
def test_netmod_that_stays(environ: dict[str, str], library: str) -> None:
    before = dict(environ)
    choose_netmod(environ, library)
    assert environ == before


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "size", "text"),
    [
        (TORCHRUN, 1, "torchrun started 4 processes (WORLD_SIZE=4), but MPICH does not see them"),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, 1, "accelerate launch started 4 processes"),
        ({"RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}, 1, "deepspeed started 2 processes (WORLD_SIZE=2)"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu", "RAY_JOB_ID": "1"},
            1,
            "Ray started 2 proc",
        ),
        ({"RANK": "3"}, 3, "another launcher started 4 processes (at least, as RANK=3)"),
        (TORCHRUN, 2, "each would be in a world of 2. Needed is one world of 4"),
    ],
)
def test_launcher_of_another_library_is_refused_with_the_command(environ: dict[str, str], size: int, text: str) -> None:
    with pytest.raises(TopologyError) as error:
        check_launch(environ, size, MPICH, COMMAND)
    assert text in str(error.value)
    line = "/env/bin/python train.py`" if "Ray" in text else f"{LINE}`"
    assert f"start with `mpiexec -n {environ.get('WORLD_SIZE', 4)} {line}, where mpiexec is that of MPICH" in str(
        error.value
    )
    assert "set MPIDIST_ALONE=1" in str(error.value)
    check_launch(environ | {"MPIDIST_ALONE": "1"}, size, MPICH, COMMAND)


@pytest.mark.parametrize("size", [4, 8])
def test_launcher_of_another_library_that_agrees_with_mpi_passes(size: int) -> None:
    """A script may set the variables of PyTorch from those of MPI."""
    check_launch(TORCHRUN, size, MPICH, COMMAND)
    check_launch({"RANK": "0", "WORLD_SIZE": "1"}, 1, MPICH, COMMAND)
    check_launch({"RANK": "none", "WORLD_SIZE": ""}, 1, MPICH, COMMAND)


BUILD = "import mpidist; print('world of', mpidist.MultiWorkerMirroredStrategy().topology.size)"


@pytest.mark.parametrize(
    ("program", "variables", "said"),
    [
        (BUILD, {}, "torchrun started 4 processes"),
        (BUILD, {"MPIDIST_ALONE": "1"}, "world of 1"),
        (BUILD.replace("MultiWorkerMirrored", "OneDevice"), {}, "world of 1"),
        (BUILD, {"_MPIDIST_RANK_PID": "1"}, "world of 1"),  # a program that a rank has started, with its environment
    ],
)
def test_launcher_of_another_library_and_a_strategy(program: str, variables: dict[str, str], said: str) -> None:
    environment = {**clean_environment(), **TORCHRUN, **variables, "PYTHONPATH": PROJECT}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert said in done.stdout + done.stderr
    assert done.returncode == (said != "world of 1")


NO_MPI = """
import shutil, sys
from mpidist.transport.mpi import library
sys.modules["mpi4py"] = None
library.find_library = lambda name: {found!r}
library.shutil.which = lambda name: name if name in {programs!r} else None
library.load_mpi()
"""


@pytest.mark.parametrize(
    ("found", "programs", "hint"),
    [
        (None, (), "names a library that mpi4py does not find\n"),
        (
            "libmpich.so.12",
            ("mpicc.mpich", "mpicc"),
            "To use libmpich.so.12, .*, and `MPICC=mpicc.mpich pip install .*`\n",
        ),
        (None, ("mpicc",), "To use the MPI of mpicc, compile mpi4py: `pip install .*--no-binary mpi4py mpi4py`\n"),
    ],
)
def test_absent_mpi_says_how_to_use_what_is_installed(found: str | None, programs: tuple[str, ...], hint: str) -> None:
    environment = {**clean_environment(), "PYTHONPATH": PROJECT}
    command = [sys.executable, "-c", NO_MPI.format(found=found, programs=programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert re.search(f"none could be loaded: .*{hint}$", done.stderr), done.stderr
