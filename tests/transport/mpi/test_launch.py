"""One world of N ranks, or N worlds of one."""

import json
import logging
import pathlib
import re
import subprocess
import sys
from itertools import product

import pytest
from jobs.failing import PROJECT
from mpi_session import clean_environment

from mpidist.errors import TopologyError
from mpidist.transport.mpi.launch import check_before_init, check_launch, choose_network

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
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def recorded(path):
    return json.loads((FIXTURES / path).read_text())


def slurm_tasks(shape):
    return recorded(f"slurm-env/{shape}.json")["tasks"]


def mpi_ranks(name):
    return [rank["env"] for rank in recorded(f"mpi-env/{name}.json")["ranks"]]


def error_of(environ, library, command=COMMAND, size=1):
    with pytest.raises(TopologyError) as error:
        check_launch(environ, size, library, command)
    return str(error.value)


KINDS = {MPICH: "pmi2", INTEL: "pmi2", MVAPICH: "pmi2", OPEN_MPI: "pmix", CRAY: "cray_shasta", OTHER: "TYPE"}


def without_pmi(library, kind):
    texts = [f"`srun --mpi={kind} -N 2 -n 4 {LINE}`", "srun --mpi=none started 4 ranks (SLURM_STEP_NUM_TASKS=4)"]
    return slurm_tasks("2nodes-4tasks-none"), library, [*texts, f"inside the allocation with `mpiexec -n 4 {LINE}`"]


# What started the ranks; their library of MPI; what the error says.
REFUSED = [
    *(without_pmi(*one) for one in KINDS.items()),
    (
        slurm_tasks("2nodes-4tasks-pmi2"),
        OPEN_MPI,
        ["srun --mpi=pmi2 started 4 ranks (PMI_SIZE=4)", f"start with `srun --mpi=pmix -N 2 -n 4 {LINE}`"],
    ),
    # A plugin alone does not help every build.
    (
        slurm_tasks("2nodes-4tasks-pmix"),
        OPEN_MPI,
        ["this build of the library does not speak that", f"inside the allocation use `mpiexec -n 4 {LINE}`"],
    ),
    ([STEP], OTHER, ["`srun --mpi=list` shows each TYPE"]),
    *(
        (
            mpi_ranks(name),
            library,
            [f"mpiexec started 4 ranks ({variable}=4)", f"`mpiexec -n 4 {LINE}`, where mpiexec is that of {owner}"],
        )
        for name, library, variable, owner in (
            ("ompi-mpirun-2hosts-4ranks", MPICH, "OMPI_COMM_WORLD_SIZE", "MPICH"),
            ("ompi-mpirun-2hosts-4ranks", INTEL, "OMPI_COMM_WORLD_SIZE", "Intel MPI"),
            ("mpich-mpirun-2hosts-4ranks", OPEN_MPI, "PMI_SIZE", "Open MPI"),
            ("mpich-mpirun-2hosts-4ranks", MPICH, "PMI_SIZE", "MPICH"),
        )
    ),
    ([{"MPI_LOCALNRANKS": "3"}], OTHER, ["mpiexec started 3 ranks"]),
    ([{"MV2_COMM_WORLD_SIZE": "5"}], OTHER, ["mpiexec started 5 ranks"]),
    ([{"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-1@1"}], OTHER, ["mpiexec started 2 ranks"]),
    # mpiexec in an allocation: the step is that of its daemons.
    ([{**STEP, **HYDRA, "PMI_SIZE": "8"}], OTHER, ["mpiexec started 8 ranks"]),
    ([{**STEP, **PRRTE}], OTHER, ["mpiexec started 2 ranks"]),
]


def test_singletons_are_refused_with_the_command_that_starts_one_world():
    for environs, library, texts in REFUSED:
        for environ in environs:
            text = error_of(environ, library)
            assert [one for one in texts if one not in text] == [], text


def test_launch_error_has_command_for_separate_programs():
    text = error_of({**STEP, **HYDRA}, OPEN_MPI)
    unset = "-u SLURM_STEP_NUM_TASKS -u PMI_SIZE -u MPI_LOCALNRANKS -u PMI_FD"
    assert f"(If separate programs are meant: `env {unset} python ...`.)" in text
    alone = {name: value for name, value in {**STEP, **HYDRA}.items() if name not in unset.split()}
    check_launch(alone, 1, OPEN_MPI, COMMAND)


@pytest.mark.parametrize(("library", "companion"), [(MPICH, "hydra_pmi_proxy"), (OPEN_MPI, "ompi_info")])
def test_mpiexec_beside_the_interpreter_is_named_if_it_is_the_librarys(tmp_path, library, companion):
    (tmp_path / "mpiexec").touch()
    python = str(tmp_path / "python")
    environ = {"PMI_SIZE": "4"}
    assert f"{tmp_path}/mpiexec" not in error_of(environ, library, [python, "a.py"])
    (tmp_path / companion).touch()
    assert f"`{tmp_path}/mpiexec -n 4 {python} a.py`" in error_of(environ, library, [python, "a.py"])


def test_command_without_interpreter_gets_one():
    assert "-n 4 python train.py -v`" in error_of(STEP, MPICH, ["train.py", "-v"])


def test_sane_world_of_one_passes():
    sane = [
        {},
        {**HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        {**PRRTE, "OMPI_COMM_WORLD_SIZE": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {**STEP, **PRRTE, "OMPI_COMM_WORLD_SIZE": "1"},  # the daemons are on two nodes
        {**STEP, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2"},  # a shell of salloc
        {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "none", "WORLD_SIZE": ""},
        *slurm_tasks("1node-1task"),
    ]
    for library, environ in product((MPICH, OPEN_MPI, INTEL, OTHER), sane):
        check_launch(environ, 1, library, COMMAND)
        check_before_init(environ, library, COMMAND)
    # A rank of Open MPI starts `mpiexec -n 1` of MPICH, and the other way round; MPI_Comm_spawn of one rank.
    check_launch({**PRRTE, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, 1, MPICH, COMMAND)
    check_launch({**HYDRA, **PRRTE, "OMPI_COMM_WORLD_SIZE": "1"}, 1, OPEN_MPI, COMMAND)
    spawned = {**STEP, **HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "PMI_SPAWNED": "1"}
    check_launch(spawned, 1, MPICH, COMMAND)


def test_world_of_several_ranks_is_never_questioned():
    """A step may hold several programs; a script may set the variables of PyTorch from those of MPI."""
    for path in (FIXTURES / "slurm-env").iterdir():
        for environ, size in product(slurm_tasks(path.stem), (2, 3, 32)):
            check_launch(environ, size, MPICH, COMMAND)
    for size in (4, 8):
        check_launch(TORCHRUN, size, MPICH, COMMAND)


def test_forgotten_srun_is_a_warning_with_the_line(caplog):
    batch = recorded("slurm-env/2nodes-4tasks-pmi2.json")["batch"]
    with caplog.at_level(logging.WARNING, "mpidist"):
        check_launch(batch, 1, OPEN_MPI, COMMAND)
    assert [record.getMessage() for record in caplog.records] == [
        f"r0 | one rank in a Slurm job of 4 tasks; all of them: srun --mpi=pmix -N 2 -n 4 {LINE}"
    ]


def test_launch_of_one_rank_on_purpose_logs_nothing(caplog):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    alone = {**HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}
    with caplog.at_level(logging.DEBUG, "mpidist"):
        for environ in ({}, {"SLURM_NTASKS": "4"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, job | alone):
            check_launch(environ, 1, MPICH, COMMAND)
    assert not caplog.records


def test_pmix_launcher_is_refused_before_mpich_aborts():
    """Libraries that may speak PMIx are left to start, and MPICH under its own launchers."""
    for environ in [*mpi_ranks("ompi-mpirun-2hosts-4ranks"), *slurm_tasks("2nodes-4tasks-pmix")]:
        with pytest.raises(TopologyError, match="started 4 ranks"):
            check_before_init(environ, MPICH, COMMAND)
        for library in (MPICH_WITH_PMIX, OPEN_MPI, INTEL, OTHER):
            check_before_init(environ, library, COMMAND)
    own = [*mpi_ranks("mpich-mpirun-2hosts-4ranks"), *slurm_tasks("2nodes-4tasks-pmi2")]
    for environ in [*own, {**PRRTE, **HYDRA}]:
        check_before_init(environ, MPICH, COMMAND)


MPICH_OF_TWO_NETMODS = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
NETMOD = "MPIR_CVAR_CH4_NETMOD"
SRUN = {**STEP, "PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "9"}


@pytest.mark.parametrize(
    ("environ", "library", "netmod"),
    [
        pytest.param(SRUN, MPICH_OF_TWO_NETMODS, "ofi", id="two nodes"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}, MPICH_OF_TWO_NETMODS, "ofi", id="two groups"
        ),
        pytest.param({**SRUN, NETMOD: "ucx"}, MPICH_OF_TWO_NETMODS, "ucx", id="the user's"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, MPICH_OF_TWO_NETMODS, None, id="one node"),
        pytest.param({**STEP, **HYDRA}, MPICH_OF_TWO_NETMODS, None, id="mpiexec in a job"),
        pytest.param({}, MPICH_OF_TWO_NETMODS, None, id="alone"),
        pytest.param({**SRUN, "FI_PROVIDER": "sockets"}, MPICH, None, id="libfabric alone"),
        pytest.param(SRUN, INTEL, None, id="Intel"),
        pytest.param(SRUN, CRAY, None, id="Cray"),
        pytest.param(SRUN, OPEN_MPI, None, id="Open MPI"),
    ],
)
def test_netmod_is_that_which_pmi2_of_slurm_carries(environ, library, netmod):
    chosen = dict(environ)
    choose_network(chosen, library)
    provider = {"FI_PROVIDER": "^sockets"} if library == MPICH_OF_TWO_NETMODS else {}
    assert chosen == provider | environ | ({NETMOD: netmod} if netmod else {})


@pytest.mark.parametrize(
    ("environ", "size", "text"),
    [
        (TORCHRUN, 1, "torchrun started 4 processes (WORLD_SIZE=4), but MPICH does not see them"),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, 1, "accelerate launch started 4 processes"),
        ({"RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}, 1, "deepspeed started 2 processes (WORLD_SIZE=2)"),
        ({"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu", "RAY_JOB_ID": "1"}, 1, "Ray started 2 "),
        ({"RANK": "3"}, 3, "another launcher started 4 processes (at least, as RANK=3)"),
        (TORCHRUN, 2, "each would be in a world of 2. Needed is one world of 4"),
    ],
)
def test_launcher_of_another_library_is_refused_with_the_command(environ, size, text):
    said = error_of(environ, MPICH, size=size)
    assert text in said
    line = "/env/bin/python train.py`" if "Ray" in text else f"{LINE}`"
    assert f"start with `mpiexec -n {environ.get('WORLD_SIZE', 4)} {line}, where mpiexec is that of MPICH" in said
    assert "set MPIDIST_ALONE=1" in said
    check_launch(environ | {"MPIDIST_ALONE": "1"}, size, MPICH, COMMAND)


def output_of(program, **variables):
    """Run a Python program alone; return its status, and what it wrote."""
    environment = {**clean_environment(), **variables, "PYTHONPATH": PROJECT}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


BUILD = """
import mpidist
print("device of", mpidist.OneDeviceStrategy().topology.size)
print("world of", mpidist.MultiWorkerMirroredStrategy().topology.size)
"""


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "torchrun started 4 processes"),
        ({"MPIDIST_ALONE": "1"}, "world of 1"),
        ({"_MPIDIST_RANK_PID": "1"}, "world of 1"),  # a program that a rank has started, with its environment
    ],
)
def test_launcher_of_another_library_and_a_strategy(variables, text):
    status, output = output_of(BUILD, **TORCHRUN, **variables)
    assert "device of 1" in output
    assert text in output
    assert status == (text != "world of 1")


NO_MPI = """
import shutil, sys
from mpidist.transport.mpi import library
sys.modules["mpi4py"] = None
for found, programs in ((None, ()), ("libmpich.so.12", ("mpicc.mpich", "mpicc")), (None, ("mpicc",))):
    library.find_library = lambda name: found
    library.shutil.which = lambda name: name if name in programs else None
    try:
        library.load_mpi()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_absent_mpi_error_has_commands_for_installed_mpis():
    _, output = output_of(NO_MPI)
    pattern = r"""
.*none could be loaded: .*names a library that mpi4py does not find
.*none could be loaded: .*To use libmpich.so.12, .*, and `MPICC=mpicc.mpich pip install .*`
.*none could be loaded: .*To use the MPI of mpicc, compile mpi4py: `pip install .*--no-binary mpi4py mpi4py`
"""
    assert re.fullmatch(pattern.lstrip(), output), output
