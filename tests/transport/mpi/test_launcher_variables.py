"""What is read from the variables of launchers."""

import pytest

from mpidist.transport.mpi.launcher_variables import launcher_text, numbers_of, rank_from_environment

pytestmark = pytest.mark.no_mpi

HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "3"}
PRRTE = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_RANK": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_SIZE": "3"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "numbers", "rank"),
    [
        ({}, None, None),
        (HYDRA, (2, 4, 3), 2),
        (PRRTE, (2, 4, 3), 2),
        (STEP, (0, 2, 0), 0),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 0), 1),
        ({**STEP, "PMIX_RANK": "0"}, (0, 2, 0), 0),
        ({"PMIX_RANK": "3"}, None, 3),
        ({**STEP, **HYDRA}, (2, 4, 3), 2),  # mpiexec in a step: of its daemons
        ({"PMI_RANK": "many", "PMI_SIZE": ""}, None, None),
    ],
)
def test_rank_and_size_are_those_of_the_innermost_launcher(environ, numbers, rank):
    assert numbers_of(environ) == numbers
    assert rank_from_environment(environ) == rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "none: this process was started alone"),
        ({"SLURM_JOB_ID": "7"}, "none: this process was started alone, in Slurm's job 7"),
        (HYDRA, "mpiexec of MPICH, or of one of its kin"),
        (MVAPICH, "mpiexec of MVAPICH"),
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2"}, "srun --mpi=pmi2, in Slurm's job 7, step 1"),
        ({**STEP, "PMIX_RANK": "0"}, "srun --mpi=pmix, in Slurm's job 7, step 1"),
        (STEP, "srun --mpi=none, in Slurm's job 7, step 1"),
        ({**PRRTE, "PRTE_LAUNCHED": "1"}, "mpiexec of Open MPI"),
        ({"PMIX_RANK": "0"}, "a launcher with PMIx"),
        ({"PMI_RANK": "0"}, "a launcher with PMI"),
    ],
)
def test_launcher_is_named_from_its_variables(environ, expected):
    assert launcher_text(environ) == expected
