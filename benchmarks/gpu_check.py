"""Check mpidist on a GPU in at most eight minutes: right numbers, and how fast, beside other libraries.

    python benchmarks/gpu_check.py                 # results in $OUT, or ./gpu-results
    python benchmarks/gpu_check.py --only pack,overlap

Each part runs in processes of its own, within a limit of its own, the most important first; what fails says why in the
table, and the others go on. Results are written after each part: `gpu_check.json`, `gpu_check.md`, `gpu_check.log`.
It ends with 0 if everything was measured and is right, with 1 if not, and with 3 without a GPU.

Several ranks share one GPU here in two ways: staged through the host, and over real NCCL that is told that every rank
is on a host of its own (`NCCL_HOSTID`). The second is slow by its nature, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu import running  # noqa: E402
from gpu.environment import Environment, prepare  # noqa: E402
from gpu.part import NO_GPU  # noqa: E402
from gpu.parts import PARTS, Part  # noqa: E402
from gpu.report import is_missing, table  # noqa: E402
from gpu.running import Outcome  # noqa: E402
from record import commit_of  # noqa: E402

LIMIT_SECONDS = 470.0
LANES = 2  # parts that do not measure run so many at a time
RESERVED = 0.35  # of the time, for those, whatever the others take


class Check:
    """One run.

    Args:
        parts: What to do, in this order.
        out: Folder for the results.
        seconds: Time for all.
    """

    def __init__(self, parts: Sequence[Part], out: Path, seconds: float) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._parts, self._out = parts, out
        self._start = time.monotonic()
        self._until = self._start + seconds
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": os.environ.get("GPU_CHECK_COMMIT") or commit_of(ROOT),
            "source": source_digest(),
        }

    def run(self, environment: Environment, folder: Path) -> None:
        """Do all parts: those that measure one by one, then the others, two at a time."""
        self._facts["MPI"] = environment.mpi
        others = [part for part in self._parts if not part.alone]
        kept = RESERVED * (self._until - self._start) if others else 0.0
        for part in (its for its in self._parts if its.alone):
            self._one(part, self._until - kept, environment, folder)
        with ThreadPoolExecutor(LANES) as lanes:
            try:
                for one in [lanes.submit(self._one, its, self._until, environment, folder) for its in others]:
                    one.result()
            except KeyboardInterrupt:
                lanes.shutdown(wait=False, cancel_futures=True)
                running.kill_all()
                raise

    def leave_out(self, why: str) -> None:
        """Note that nothing more is done."""
        for part in self._parts:
            if part.name not in self.outcomes:
                self.outcomes[part.name] = running.not_run(part, why)
        self.write()

    def _one(self, part: Part, until: float, environment: Environment, folder: Path) -> None:
        try:
            outcome = running.run(part, until - time.monotonic(), environment, folder)
        except Exception as error:  # of this program: the other parts go on
            outcome = running.not_run(part, f"gpu_check.py itself: {type(error).__name__}: {error}")
        with self._lock:
            self.outcomes[part.name] = outcome
            self.write()
            wrong = sum(row.is_right is False for row in outcome.rows)
            said = f"{len(outcome.rows)} answers, {wrong} wrong" + (f", {outcome.why}" if outcome.why else "")
            now = time.monotonic() - self._start
            print(f"[{now:6.1f} s] {part.name}: {outcome.seconds:.1f} s, {said}", flush=True)

    @property
    def is_all_right(self) -> bool:
        """Whether everything was measured and is right."""
        rows = [row for its in self.outcomes.values() for row in its.rows]
        return bool(rows) and not any(row.is_right is False or is_missing(row) for row in rows)

    def write(self) -> None:
        """Write what is known so far."""
        done = [self.outcomes[part.name] for part in self._parts if part.name in self.outcomes]
        facts = dict(self._facts)
        for outcome in done:
            facts |= outcome.facts
        facts["time"] = f"{time.monotonic() - self._start:.0f} s"
        rows = {outcome.name: outcome.rows for outcome in done}
        times = ", ".join(f"{its.name} {its.seconds:.0f} s" for its in done)
        reasons = dict.fromkeys(its.why for its in done if its.why)
        failed = [f"* {', '.join(its.name for its in done if its.why == why)}: {why}" for why in reasons]
        text = table(
            facts, rows, [f"Parts: {times}.", *(["", "What did not end well:", "", *failed] if failed else [])]
        )
        parts = [{**asdict(its), "log": None} for its in done]
        self._put("gpu_check.md", text)
        self._put("gpu_check.json", json.dumps({"facts": facts, "parts": parts}, indent=1, default=str))
        self._put("gpu_check.log", "\n".join(f"===== {its.name}\n{its.log}" for its in done))

    def _put(self, name: str, text: str) -> None:
        part = self._out / f".{name}"
        part.write_text(text, encoding="utf-8")
        part.replace(self._out / name)


def source_digest() -> str:
    """Hash the library's files: what was measured, also where no commit can be told."""
    its = hashlib.sha256()
    for path in sorted((ROOT / "mpidist").rglob("*")):
        if path.suffix in (".py", ".cu"):
            its.update(path.read_bytes())
    return its.hexdigest()[:12]


def why_no_gpu(environment: Environment) -> str:
    """Say why nothing can be measured; empty if there is a GPU. In a process of its own, which may crash."""
    program = "from mpidist.transport.cuda import current; s = current().support; print(s.num_devices, s.reason)"
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, env=dict(environment.variables), capture_output=True, text=True, timeout=90, check=False
        )
    except subprocess.TimeoutExpired:
        return "looking for a GPU took more than 90 s"
    number, _, reason = done.stdout.strip().rpartition("\n")[2].partition(" ")
    if done.returncode or not number.isdecimal():
        return f"looking for a GPU failed, code {done.returncode}: {done.stderr.strip()[-300:]}"
    return "" if int(number) else reason


def choose(only: str, skip: str) -> list[Part]:
    """Return the parts of `--only`, or all but those of `--skip`.

    Raises:
        SystemExit: If there is no such part.
    """
    names = [part.name for part in PARTS]
    wanted, unwanted = ([name for name in text.split(",") if name] for text in (only, skip))
    unknown = [name for name in (*wanted, *unwanted) if name not in names]
    if unknown:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    return [part for part in PARTS if (part.name in wanted if wanted else part.name not in unwanted)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels: %(default)s")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="time for all: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small arrays and few turns: see whether it runs")
    parser.add_argument("--only", default="", help="parts, as pack,overlap")
    parser.add_argument("--skip", default="", help="parts to leave out")
    return parser.parse_args()


def _stop(number: int, _: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    given = _parse()
    parts = choose(given.only, given.skip)
    if given.tiny:  # also on GPUs that are emulated by a few busy cores
        parts = [replace(part, limit=2 * part.limit) for part in parts]
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    check = Check(parts, given.out.resolve(), given.seconds)
    signal.signal(signal.SIGTERM, _stop)
    if given.tiny:
        os.environ["GPU_CHECK_TINY"] = "1"
    try:
        environment = prepare(given.wheels, folder)
        print(f"MPI: {environment.mpi}", flush=True)
        reason = why_no_gpu(environment)
        if reason:
            print(f"nothing can be checked here: {reason}", flush=True)
            check.leave_out(f"no GPU: {reason}")
            return NO_GPU
        check.run(environment, folder)
    except KeyboardInterrupt as error:
        check.leave_out(f"the check was stopped {error}")
        return 1
    finally:
        running.kill_all()
        shutil.rmtree(folder, ignore_errors=True)
        print((given.out / "gpu_check.md").read_text() if (given.out / "gpu_check.md").exists() else "no results")
    return int(not check.is_all_right)


if __name__ == "__main__":
    sys.exit(main())
