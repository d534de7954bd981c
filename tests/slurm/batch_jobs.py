"""Batch jobs of an emulated cluster: submitted with sbatch, as a user would, and what became of them."""

import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
from jobs.failing import processes_with
from mpi_session import HANG_SECONDS, OF_RANKS, clean_environment
from slurm.emulated_cluster import ClusterError, EmulatedCluster

import mpidist

__all__ = ["LIBRARIES", "PROJECT", "BatchJob", "Ended", "job_environment", "submit"]

PROJECT = Path(mpidist.__file__).parents[1]
_ENVIRONMENTS = {"MPICH": ".venv", "Open MPI": ".venv-openmpi"}
LIBRARIES = tuple(_ENVIRONMENTS)
_BEFORE_THE_END = {"CONFIGURING", "COMPLETING", "PENDING", "RUNNING", "SUSPENDED"}


@final
@dataclass(frozen=True)
class Ended:
    """A job that has come to its end."""

    state: str  # what Slurm says of it, such as COMPLETED
    code: int  # the exit code that Slurm has of it
    output: str  # what it wrote

    def __str__(self):
        return f"{self.state} with {self.code}; it wrote:\n{self.output}"


@final
@dataclass
class BatchJob:
    """A job that was submitted."""

    cluster: EmulatedCluster  # where
    number: str  # Slurm's number; of a heterogeneous job, that of the first component
    folder: Path  # where it was submitted, and writes its output

    def wait_for_output(self, text):
        self._wait_until(lambda: text in self._output(), f"did not write {text!r}")

    def wait_for_file(self, pattern):
        self._wait_until(lambda: any(self.folder.glob(pattern)), f"did not make {pattern}")

    def start_again(self, attempt, time_limit):
        """Wait until the job is requeued for this attempt, and let it start, with a time limit.

        Slurm waits two minutes, counted from the end of the attempt before: a start that is set earlier is forgotten.
        And a job that starts in the second in which it was requeued fails, as Slurm has revoked its credential.
        """
        self._wait_until(lambda: self.restarts() >= attempt and self._states() == {"PENDING"}, "was not requeued")
        time.sleep(2)
        self.cluster.call("scontrol", "update", f"JobId={self.number}", f"TimeLimit={time_limit}")

        def has_started():
            if self._states() <= {"RUNNING", "COMPLETED", "FAILED"}:
                return True
            with suppress(ClusterError):  # it has started meanwhile
                self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            return False

        self._wait_until(has_started, f"did not start for attempt {attempt}")

    def restarts(self):
        number = re.search(r"Restarts=(\d+)", self._show())
        assert number
        return int(number[1])

    def cancel(self):
        """Cancel the job as `scancel` does, and wait for its end."""
        self.cluster.call("scancel", self.number)
        return self.end()

    def end(self):
        """Wait for the end of the job, and of all its processes."""
        self._wait_until(lambda: not self._states() & _BEFORE_THE_END, "did not end")
        shown = self._show()
        state, code = re.search(r"JobState=(\w+)", shown), re.search(r" ExitCode=(\d+):", shown)
        assert state, shown
        assert code, shown
        return Ended(state[1], int(code[1]), self._output())

    def codes(self):
        """Wait for the end of all tasks of a job array, and return their exit codes by their numbers."""
        self._wait_until(lambda: not self._states() & _BEFORE_THE_END, "did not end")
        tasks = re.findall(r"ArrayTaskId=(\d+) .* ExitCode=(\d+):", self._show())
        return {task: int(code) for task, code in tasks}

    def processes(self):
        its = {"SLURM_CONF": self.cluster.environment["SLURM_CONF"], "SLURM_JOB_ID": self.number}
        return [*processes_with(**its).values()]

    def _show(self):
        return self.cluster.call("scontrol", "show", "job", "--oneliner", self.number)

    def _states(self):
        return set(re.findall(r"JobState=(\w+)", self._show()))

    def _output(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*-{self.number}.out")))

    def _wait_until(self, is_so, otherwise):
        limit = time.monotonic() + HANG_SECONDS
        while not is_so():
            if time.monotonic() > limit:
                said, shown = self._output(), self._show()
                with suppress(ClusterError):  # it may not run
                    self.cluster.call("scancel", "--signal=KILL", "--full", self.number)
                pytest.fail(f"job {self.number} {otherwise}; {shown}; it wrote:\n{said}")
            time.sleep(0.1)


def submit(
    cluster,
    folder,  # for the program and the job's output
    library,  # one of LIBRARIES: the environment with it is the job's
    script,  # the name of the project's job script, or the path of another one
    program,  # the text of the program; "" writes none
    *options,  # of sbatch
    arguments=(),  # of the program
    program_name="program.py",  # what the job script gets before them; None for nothing
    **variables,  # more of the environment
):
    """Submit a job script, with a program for its ranks."""
    if program:
        (folder / "program.py").write_text(program)
    words = [*([] if program_name is None else [program_name]), *arguments]
    command = ["sbatch", "--parsable", *options, str(PROJECT / "slurm" / script), *words]
    environment = {**job_environment(cluster, library), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return BatchJob(cluster, done.stdout.strip().partition(";")[0], folder)


def job_environment(cluster, library):
    """Return the environment of one who submits a job with a library."""
    environment = PROJECT / _ENVIRONMENTS[library]
    if not environment.exists():
        pytest.skip(f"there is no {environment.name}: `make test-long` makes it")
    inherited = clean_environment()
    inherited.pop("USER", None)  # cron, containers and some sites do not set it
    return {
        **inherited,
        **cluster.environment,
        "VIRTUAL_ENV": str(environment),
        "PYTHONPATH": str(PROJECT),
        **OF_RANKS,
        # Its own messages crash a rank that gets one before it has left MPI_Init (open-mpi/ompi#12495), as Slurm's PMIx
        # holds nobody back. UCX keeps them, and would complain at the end, for the same reason.
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
        "OMPI_MCA_opal_common_ucx_verbose": "-1",
        "UCX_LOG_LEVEL": "fatal",
        "OMPI_MCA_osc": "^ucx",  # writes of its own when a shared window is made, and is not used
    }
