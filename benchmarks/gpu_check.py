"""Check mpidist on a GPU in at most eight minutes: right numbers, and how fast, beside other libraries.

`gpu_check.md` and `gpu_check.log` are written after each part, into $OUT or ./gpu-results. Ends with 0 if everything
was measured and is right, with 1 if not, and with 3 without a GPU. README.md says what the parts are.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu import running  # noqa: E402
from gpu.report import NOT_MEASURED, WRONG, table  # noqa: E402
from gpu.running import PARTS, Part  # noqa: E402
from harness.record import commit_of  # noqa: E402

LIMIT_SECONDS = 470.0
PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "mpi4py", "ml-dtypes")
LANES = min(4, max(2, (os.cpu_count() or 1) // 4))  # parts that do not measure run so many at a time
FIND = """
from mpidist.transport.cuda import current
from mpidist.transport.native.loading import native
found = current().support
print("compiled:", ("no", "yes")[native is not None], "GPUs:", found.num_devices, found.reason)
"""


class Check:
    """One run of some parts, with results in a folder, within some seconds."""

    def __init__(self, parts: Sequence[Part], out: Path, seconds: float) -> None:
        self.outcomes: list[running.Outcome] = []
        versions = (f"{its.name} {its.version}" for its in distributions() if its.name in PACKAGES)
        self.facts = {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": os.environ.get("GPU_CHECK_COMMIT") or commit_of(ROOT),
            "host": f"{os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}",
        }
        self._parts, self._out, self._until = parts, out, time.monotonic() + seconds

    def run(self, environment: running.Environment, folder: Path) -> None:
        """Do all parts: those that measure one by one, then the others, some at a time."""

        def run(part: Part) -> running.Outcome:
            return running.run(part, self._until - time.monotonic(), environment, folder)

        for alone, lanes in ((True, 1), (False, LANES)):
            with ThreadPoolExecutor(lanes) as pool:
                for outcome in pool.map(run, [part for part in self._parts if part.alone == alone]):
                    self._note(outcome)

    def stop(self, number: int, _: Any) -> None:
        """End what runs, and start no more: a handler of signals."""
        self._until = 0.0
        running.kill_all()

    @property
    def is_all_right(self) -> bool:
        """Whether everything was measured and is right."""
        rows = [row for its in self.outcomes for row in its.rows]
        return bool(rows) and not any(row.verdict == WRONG or row.got == NOT_MEASURED for row in rows)

    def _note(self, outcome: running.Outcome) -> None:
        """Write what is known so far."""
        self.outcomes.append(outcome)
        done, wrong = self.outcomes, sum(row.verdict == WRONG for row in outcome.rows)
        said = f"{len(outcome.rows)} answers, {wrong} wrong, {outcome.why}".removesuffix(", ")
        print(f"{outcome.name}: {outcome.seconds:.1f} s, {said}", flush=True)
        notes = [", ".join(f"{its.name} {its.seconds:.0f} s" for its in done), ""]
        notes += [f"* {its.name}: {its.why}" for its in done if its.why]
        (self._out / "gpu_check.md").write_text(table(self.facts, {its.name: its.rows for its in done}, notes))
        (self._out / "gpu_check.log").write_text("\n".join(f"===== {its.name}\n{its.log}" for its in done))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small arrays and few turns: see whether it runs")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="PART")
    given = parser.parse_args()
    parts = [part for part in PARTS if part.name in given.only and part.name not in given.skip]
    if given.tiny:  # also on GPUs that are emulated by a few busy cores
        os.environ["GPU_CHECK_TINY"] = "1"
        parts = [replace(part, limit=2 * part.limit) for part in parts]
    given.out.mkdir(parents=True, exist_ok=True)
    check = Check(parts, given.out.resolve(), LIMIT_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, check.stop)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        environment = running.prepare(given.wheels, Path(folder))
        check.facts["MPI"] = environment.mpi
        # In a process of its own, which may crash.
        found = running.output_of([sys.executable, "-c", FIND], environment.variables, 90).partition("compiled: ")[2]
        check.facts["compiled part"], _, found = found.strip().partition(" GPUs: ")
        number, _, reason = found.partition(" ")
        if not number.isdecimal() or not int(number):
            print(f"nothing can be checked here: {reason}", flush=True)
            return 3
        check.run(environment, Path(folder))
    print((given.out / "gpu_check.md").read_text())
    return int(not check.is_all_right)


if __name__ == "__main__":
    sys.exit(main())
