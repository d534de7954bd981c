"""Which libraries are installed, and how their ranks are started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from hosts import Hosts

ROOT: Final = Path(__file__).resolve().parents[2]
# Virtual environments by the names that `--env` takes.
FOLDERS: Final = {
    "mpich": ".venv",
    "openmpi": ".venv-openmpi",
    "intel": ".venv-impi",
    "tensors": ".venv-tensors",
    "gloo": ".venv-peers",
    "horovod": ".venv-peers-horovod",
}


@dataclass(frozen=True)
class Peer:
    """A library in its own environment."""

    name: str
    backend: str  # the class that a rank builds, as "module:class"
    modules: tuple[str, ...]  # that must be installed
    environment: str
    by_mpiexec: bool = True  # whether mpiexec starts the ranks
    copies: float = 2.0  # how many times the bytes of a work a rank holds, about
    source: Path = ROOT  # the folder that `mpidist` is imported from
    arguments: tuple[str, ...] = ()  # of the backend
    options: tuple[str, ...] = ()  # of mpiexec
    variables: dict[str, str] = field(default_factory=dict)
    ways: tuple[str, ...] = ()  # the only ways to measure; all, if there are none


_MPI: Final = "backends.mpi:Mpi"
_OURS: Final = ("mpi4py", "mpidist")
# Intel MPI: its ranks share cores with those of other libraries, and a node with nobody else.
_SHARED: Final = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
# The heaviest last: where memory is short, the last are left out of a work.
PEERS: Final = (
    Peer("mpich", _MPI, _OURS, "mpich", copies=2.6),
    Peer("openmpi", _MPI, _OURS, "openmpi", copies=2.6),
    Peer("intel", _MPI, _OURS, "intel", copies=2.6, variables=_SHARED),
    Peer("gloo", "backends.gloo:Gloo", ("torch",), "gloo", by_mpiexec=False),
    Peer("horovod", "backends.horovod:Horovod", ("horovod", "torch"), "horovod", copies=1.3),
    Peer("torch", "backends.torch:Torch", (*_OURS, "torch"), "tensors", copies=4),
    Peer("mpidist", "backends.servers:Servers", _OURS, "mpich"),
    Peer("messages", "backends.messages:Messages", ("mpi4py",), "mpich"),
    Peer("window", "backends.window:Window", ("mpi4py",), "mpich"),
)
MPIS: Final = tuple(peer.name for peer in PEERS if peer.backend == _MPI)


def _tuned(of: str, name: str, options: str = "", variables: str = "") -> Peer:
    """Take the raw calls of an MPI library, with settings that a careful user chooses for one node."""
    plain = next(peer for peer in PEERS if peer.name == of)
    more = plain.variables | dict(text.split("=") for text in variables.split())
    return replace(
        plain, name=f"{of} {name}", options=tuple(options.split()), variables=more, ways=("raw in place",), copies=1.3
    )


TUNED: Final = (
    # A tree in shared memory, with room for 1 MiB in place of 32 KiB, from the first call on.
    _tuned("mpich", "release-gather", variables="""MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=release_gather
        MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD=1 MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE=1048576
        MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE=1048576 MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE=65536"""),
    # The component for shared memory, which Open MPI does not choose by itself, with fragments of 128 KiB, not 8.
    _tuned("openmpi", "coll-sm", "--mca coll_sm_priority 90 --mca coll_sm_fragment_size 131072"),
    # Messages between pairs of ranks, which are faster than its shared memory for some sizes.
    _tuned("intel", "pt2pt", variables="I_MPI_COLL_INTRANODE=pt2pt"),
)  # fmt: skip

_FIND: Final = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_YIELDING: Final = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


def peers_of(defaults: Sequence[str]) -> list[str]:
    """List the libraries that a case can measure: those with a backend of its defaults; torch's is one of MPI, too."""
    backends = {peer.backend for peer in PEERS if peer.name in defaults}
    backends |= {"backends.torch:Torch"} if _MPI in backends else set()
    return [peer.name for peer in (*PEERS, *TUNED) if peer.backend in backends]


def python_of(peer: Peer, given: Sequence[str]) -> Path:
    """Return the Python of a library: of `ENVIRONMENT=PYTHON`, or of the folder of its environment."""
    named = dict(text.split("=", 1) for text in given)
    # Not resolved: the Python of a virtual environment is a link.
    return Path(named.get(peer.environment) or ROOT / FOLDERS[peer.environment] / "bin/python").absolute()


def missing(peer: Peer, python: Path, ranks: int) -> str:
    """Return what a library lacks; nothing if it can be started."""
    if not python.is_file():
        return "no environment"
    command = [str(python), "-c", _FIND, *peer.modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_of(peer, ranks))
    if done.returncode or done.stdout.strip():
        return f"no {done.stdout.strip() or 'python'} in its environment"
    return "no mpiexec" if peer.by_mpiexec and not _mpiexec(python) else ""


def _mpiexec(python: Path) -> str | None:
    sibling = python.parent / "mpiexec"
    return str(sibling) if sibling.is_file() else shutil.which("mpiexec")


def commands(peer: Peer, python: Path, ranks: int, folder: Path, hosts: Hosts | None) -> list[list[str]]:
    """List the commands that start all ranks of a library, on this machine or over hosts."""
    program = [str(python), "-m", "harness.rank", peer.backend, str(folder), *peer.arguments]
    if not peer.by_mpiexec:
        each = [[*program, str(rank), str(ranks)] for rank in range(ranks)]
        places = [name for name in hosts.names for _ in range(hosts.slots)] if hosts else []
        return [hosts.command(name, one) for name, one in zip(places, each, strict=True)] if hosts else each
    if hosts:
        return [[*hosts.mpiexec(python, ranks), *program]]
    mpiexec = _mpiexec(python)
    assert mpiexec is not None  # `missing` returned nothing
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version else []
    return [[mpiexec, *options, *peer.options, "-n", str(ranks), *program]]


def environment_of(peer: Peer, ranks: int, link: str = "") -> dict[str, str]:
    """Make the environment variables of all ranks: one thread each, and MPICH's settings where cores are short.

    `link` is the network interface that is measured; "" for none.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _YIELDING}
    environment |= dict.fromkeys(_ONE_THREAD, "1")
    if ranks > len(os.sched_getaffinity(0)):
        environment |= _YIELDING
    paths = [str(peer.source), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": link or "lo"}
    return environment | {"BENCHMARK_LINK": link, "MPIDIST_FLIGHT_DIR": "off"} | peer.variables
