"""What the parts run in: this Python, and an MPI that may come as wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Environment", "fits", "prepare", "unpack"]

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


@dataclass(frozen=True)
class Environment:
    """How to start a part.

    Attributes:
        variables: All of the environment.
        launcher: Takes `-n 2 program`; empty without MPI.
        mpi: What MPI it is, or why there is none and what to do.
    """

    variables: Mapping[str, str]
    launcher: tuple[str, ...]
    mpi: str


def fits(wheel: str) -> bool:
    """Say whether a wheel, by its name, is for this Python."""
    tags = wheel.removesuffix(".whl").split("-")[-3:]
    mine = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return tags[0] == mine or tags[1] == "abi3" or any(tag in ("py3", f"py{mine[2:]}") for tag in tags[0].split("."))


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel into a folder: its packages, and below it `bin` and `lib` of what it brings beside them.

    pip's `--target` leaves out `lib`, where wheels of MPI have their libraries.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = Path(member.filename).parts
            if member.is_dir() or ".." in parts or member.filename.startswith("/"):
                continue
            if parts[0].endswith(".data"):
                parts = (("bin",) if parts[1] == "scripts" else ()) + parts[2:]
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            target.chmod((member.external_attr >> 16) & 0o777 | 0o644)


def prepare(wheels: Path, folder: Path) -> Environment:
    """Unpack what is in a folder of wheels, if there is one, and find an MPI that works.

    Args:
        wheels: The folder.
        folder: Where the wheels are unpacked.
    """
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    carried = [wheel for wheel in sorted(wheels.glob("*.whl")) if fits(wheel.name)]
    for wheel in carried:
        unpack(wheel, site)
    path = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests"), str(site), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(its for its in path if its)}
    variables["CUPY_CACHE_DIR"] = str(folder / "kernel-cache")
    beside = Path(sys.executable).parent
    places = [site / "bin", beside] if (site / "bin" / "mpiexec").exists() else [beside]
    variables["PATH"] = os.pathsep.join([*map(str, places), os.environ.get("PATH", "")])
    library = next(iter(sorted((site / "lib").glob("libmpi.so.*"))), None) if (site / "lib").is_dir() else None
    if library is not None:
        variables["MPI4PY_LIBMPI"] = str(library)
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(
            [str(library.parent), str(library.parent / "mpich"), os.environ.get("LD_LIBRARY_PATH", "")]
        ).rstrip(os.pathsep)
    launcher = _launcher(variables)
    mpi = _mpi(variables, launcher)
    if mpi:
        help_text = (
            "`make gpu-wheels` where there is a network, and carry the folder `wheels`; see benchmarks/README.md"
        )
        return Environment(variables, (), f"{mpi}; {help_text}")
    variables["GPU_CHECK_MPIEXEC"] = " ".join(launcher)
    carried_text = f", of {', '.join(wheel.name.split('-')[0] for wheel in carried)} carried" if carried else ""
    return Environment(variables, launcher, f"{_said([launcher[0], '--version'], variables)}{carried_text}")


def _launcher(variables: Mapping[str, str]) -> tuple[str, ...]:
    program = shutil.which("mpiexec", path=variables["PATH"])
    if program is None:
        return ()
    said = _run([program, "--version"], variables, 30)
    is_openmpi = re.search(r"Open MPI|PRRTE|OpenRTE", said) is not None
    return (program, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none") if is_openmpi else (program,)


def _mpi(variables: Mapping[str, str], launcher: tuple[str, ...]) -> str:
    """Say why two ranks cannot meet; empty if they can."""
    if not launcher:
        return "there is no mpiexec"
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; n = c.reduce(1); print('sum', n) if c.rank == 0 else None"
    said = _run([*launcher, "-n", "2", sys.executable, "-c", program], variables, 60)
    if "sum 2" in said:
        return ""
    return f"two ranks did not meet: {(said.strip().splitlines() or ['no output'])[-1][:200]}"


def _run(command: list[str], variables: Mapping[str, str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


def _said(command: list[str], variables: Mapping[str, str]) -> str:
    said = _run(command, variables, 30)
    number = re.search(r"\d+\.\d+[\w.]*", said)
    name = "MPICH" if "HYDRA" in said else "Open MPI" if re.search(r"Open MPI|PRRTE|OpenRTE", said) else "MPI"
    return f"{name} {number[0]}" if number else name
