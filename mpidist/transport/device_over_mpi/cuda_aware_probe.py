"""May MPI be given device memory? What MPI says of itself, what a probe proves, and what all ranks agree on.

MPI that cannot take device memory reads it as host memory, and crashes. So it is never tried in this process: only
where MPI says that it can, a child process tries, and the answer is kept in a file of this user's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from mpidist.transport.agreement import Agreement
from mpidist.transport.cuda import Cuda
from mpidist.transport.device_over_mpi.cuda_aware_child import RIGHT
from mpidist.transport.mpi import load_mpi
from mpidist.transport.text import first_line, name_ranks
from mpidist.transport.topology import Topology

__all__ = ["Answer", "Probe", "ProbeKey", "agree", "child_command", "child_environment", "hint", "load", "save"]

logger = logging.getLogger("mpidist.transport")

PROBE_SECONDS: Final = 60.0
_NAP: Final = 0.02  # between two looks at a probe
_TAIL: Final = 2000  # characters of what a probe wrote
# A child with any of them would join the job of its parent, or wait for it. Settings of the MPI library stay.
_LAUNCHERS: Final = (
    "PMI", "PALS_", "PRTE_", "HYDI_", "HYDRA_", "SLURM_", "FLUX_", "MPI_LOCAL", "MPIEXEC_", "MV2_COMM_WORLD",
    "OMPI_COMM_WORLD", "OMPI_APP", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS", "OMPI_NUM_APP", "OMPI_UNIVERSE",
    "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "OMPI_MCA_prte", "OMPI_MCA_initial",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Answer:
    """Whether MPI takes device memory, and how that is known."""

    works: bool
    reason: str


@final
@dataclass(frozen=True)
class ProbeKey:
    """What an answer holds for.

    Attributes:
        mpi: MPI's own text on its version.
        driver_version: As CUDA numbers it, and so is the next one.
        runtime_version: Of the CUDA runtime.
        cupy_version: Of CuPy.
        hostname: The host.
    """

    mpi: str
    driver_version: int
    runtime_version: int
    cupy_version: str
    hostname: str

    @classmethod
    def here(cls, cuda: Cuda, hostname: str) -> ProbeKey:
        """Make that of this process."""
        support = cuda.support
        version = load_mpi().Get_library_version().rstrip("\0").strip()
        return cls(version, support.driver_version, support.runtime_version, support.cupy_version, hostname)

    def path(self, environ: Mapping[str, str]) -> Path:
        """Say where its answer is kept: in `mpidist` in `XDG_CACHE_HOME`, or in `~/.cache`."""
        cache = environ.get("XDG_CACHE_HOME", "").strip()
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return (Path(cache) if cache else Path.home() / ".cache") / "mpidist" / f"device-mpi-{digest}.json"


_known: Final[dict[ProbeKey, Answer]] = {}  # of this process, should there be no file


def load(key: ProbeKey, environ: Mapping[str, str] = os.environ) -> Answer | None:
    """Return the answer that was found before, if there is one."""
    with suppress(OSError, ValueError, RuntimeError, TypeError, KeyError):  # a file that cannot be read is no answer
        found = json.loads(key.path(environ).read_text(encoding="utf-8"))
        if found["key"] == asdict(key) and isinstance(found["works"], bool):
            return Answer(found["works"], str(found["reason"]))
    return _known.get(key)


def save(key: ProbeKey, answer: Answer, environ: Mapping[str, str] = os.environ) -> None:
    """Keep an answer: in a file, or in this process alone where none can be written."""
    _known[key] = answer
    try:
        path = key.path(environ)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.stem}-{uuid.uuid4().hex}")
        new.write_text(json.dumps({"key": asdict(key), **asdict(answer)}, indent=2) + "\n", encoding="utf-8")
        new.replace(path)
    except (OSError, RuntimeError) as error:
        logger.info("what is known of MPI and device memory is not kept: %s", first_line(error))


def hint() -> Answer:
    """Ask MPI itself, in the two ways that there are. A yes is no proof; no answer is a no."""
    mpi = load_mpi()
    said = []
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    if query is None:
        said.append("it has no MPIX_Query_cuda_support")
    elif query() == 1:
        return Answer(True, "MPIX_Query_cuda_support says yes")
    else:
        said.append("MPIX_Query_cuda_support says no")
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds is not None and any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")):
        return Answer(True, f"mpi_memory_alloc_kinds is {kinds}")
    said.append("it names no kinds of memory" if kinds is None else f"mpi_memory_alloc_kinds is {kinds}")
    return Answer(False, f"this MPI library is not built for CUDA: {', and '.join(said)}")


def child_command(device: int) -> list[str]:
    """Return the command that proves it."""
    return [sys.executable, "-m", "mpidist.transport.device_over_mpi.cuda_aware_child", str(device)]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a program starts MPI alone."""
    kept = {name: text for name, text in environ.items() if not name.startswith(_LAUNCHERS)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@final
class Probe:
    """A child process that gives MPI device memory. What becomes of it is the answer.

    Args:
        command: Prints `RIGHT` and exits with 0 if MPI can.
        seconds: How long it may take.
    """

    def __init__(self, command: Sequence[str], seconds: float = PROBE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._output: Any = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe could fill up
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ),
            start_new_session=True,
        )

    def outcome(self) -> Answer | None:
        """Say what became of it, once that is known. Returns at once."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._until:
            return None
        if status is None:
            self.give_up()
            return Answer(False, f"a probe did not end within {self._seconds:g} s")
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace")[-_TAIL:].strip().splitlines()
        self._output.close()
        last = lines[-1] if lines else "nothing"
        if status < 0:
            return Answer(False, f"a probe was ended by {_signal_name(-status)}")
        if status:
            return Answer(False, f"a probe failed with exit status {status}: {last}")
        if last != RIGHT:
            return Answer(False, f"a probe got wrong numbers; it said {last}")
        return Answer(True, "a probe sent device memory and got the right numbers")

    def give_up(self) -> None:
        """End it, with its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def agree(agreement: Agreement, topology: Topology, cuda: Cuda, asks: bool | None) -> Answer:
    """Find out on every node, and take the least. Collective; call it after all ranks have agreed on a call.

    Args:
        agreement: That of the ranks.
        topology: Their placement; the first rank of a node speaks for it.
        cuda: What this process has of CuPy.
        asks: `Settings.device_mpi`.
    """
    if asks is False:
        return Answer(False, "MPIDIST_DEVICE_MPI=0 asks to do without")
    its_hint = hint()
    if asks:
        its_hint = Answer(True, "MPIDIST_DEVICE_MPI=1 asks to try")
    hints = agreement.all_gather_object(its_hint)
    refusal = _first_refusal(hints, topology)
    if refusal is not None:
        return refusal
    key = ProbeKey.here(cuda, topology.hostnames[topology.rank])
    answer, probe = (load(key) if topology.is_leader else Answer(True, "")), None
    if answer is None:
        try:
            probe = Probe(child_command(int(cuda.cupy.cuda.runtime.getDevice())))
        except OSError as error:  # the others wait for an answer
            answer = Answer(False, f"a probe could not be started: {first_line(error)}")
    answers = _answers(agreement, probe, answer)
    if probe is not None:
        save(key, answers[topology.rank])
    refusal = _first_refusal(answers, topology)
    return answers[0] if refusal is None else refusal


def _answers(agreement: Agreement, probe: Probe | None, answer: Answer | None) -> list[Answer]:
    """Wait for all ranks' answers, without keeping anybody from hearing of ranks that fail. Collective."""
    try:
        while True:
            agreement.restart_clock()  # all ranks have come; what takes its time now is the probe
            answer = probe.outcome() if probe is not None and answer is None else answer
            seen: list[Answer | None] = agreement.all_gather_object(answer)
            answers = [answer for answer in seen if answer is not None]
            if len(answers) == len(seen):
                return answers
            time.sleep(_NAP)
    except BaseException:
        if probe is not None and answer is None:
            probe.give_up()
        raise


def _first_refusal(answers: Sequence[Answer], topology: Topology) -> Answer | None:
    ranks = [rank for rank, answer in enumerate(answers) if not answer.works]
    if not ranks:
        return None
    who = f"{name_ranks(ranks)} ({topology.hostnames[ranks[0]]})"
    return Answer(False, f"{who}: {answers[ranks[0]].reason}")


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
