"""What the parts run in: this Python, and an MPI that may come as wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Environment", "output_of", "prepare"]

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "MPIDIST_FLIGHT_DIR": "off",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # More ranks than cores, or ranks that wait for a GPU which others have: give up the core soon.
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
MEETING = (
    "from mpi4py import MPI; c = MPI.COMM_WORLD; n = c.reduce(1); "
    "print('sum', n, *MPI.Get_library_version().split()[:4]) if c.rank == 0 else None"
)
ADVICE = "`make gpu-wheels` where there is a network, and carry the folder `wheels`; see benchmarks/README.md"


@dataclass(frozen=True)
class Environment:
    """How to start a part: all variables; what takes `-n 2 program`, empty without MPI; which MPI, or why none."""

    variables: Mapping[str, str]
    launcher: tuple[str, ...]
    mpi: str


def prepare(wheels: Path, folder: Path) -> Environment:
    """Install what is in a folder of wheels, if there is one, into another, and find an MPI that works."""
    site = folder / "site"
    packages = sysconfig.get_path("purelib", "posix_prefix", {"base": str(site)})
    carried = sorted(map(str, wheels.glob("*.whl")))
    if carried:
        options = ("--quiet", "--no-index", "--no-deps", "--ignore-installed", "--prefix", str(site))
        output_of([sys.executable, "-m", "pip", "install", *options, *carried], os.environ, 120)
    variables = {**os.environ, **SETTINGS, "CUPY_CACHE_DIR": str(folder / "kernel-cache")}

    def put_first(name: str, *paths: object) -> None:
        variables[name] = os.pathsep.join(filter(None, [*map(str, paths), variables.get(name, "")]))

    put_first("PYTHONPATH", ROOT, ROOT / "benchmarks", ROOT / "tests", packages)
    put_first("PATH", site / "bin", Path(sys.executable).parent)
    for library in sorted((site / "lib").glob("libmpi.so.*"))[:1]:
        variables["MPI4PY_LIBMPI"] = str(library)
        put_first("LD_LIBRARY_PATH", library.parent, library.parent / "mpich")
    program = shutil.which("mpiexec", path=variables["PATH"])
    if program is None:
        return Environment(variables, (), f"there is no mpiexec; {ADVICE}")
    is_openmpi = re.search("Open MPI|PRRTE|OpenRTE", output_of([program, "--version"], variables, 30))
    launcher = (program, *(("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none") if is_openmpi else ()))
    said = output_of([*launcher, "-n", "2", sys.executable, "-c", MEETING], variables, 60).strip()
    _, met, name = said.partition("sum 2")
    if not met:
        return Environment(variables, (), f"two ranks did not meet: {said[-200:]}; {ADVICE}")
    return Environment(variables, launcher, name.strip() + f", of {len(carried)} wheels" * bool(carried))


def output_of(command: list[str], variables: Mapping[str, str], seconds: float) -> str:
    """Return what a program says, or why it does not."""
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr
