"""Jobs in which a rank goes wrong: started, watched for their output, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FAULT_SECONDS, _HANG_SECONDS = 200, 60  # until the fault, and until the end after it


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended, or has been ended. Times are seconds after the fault."""

    lines: list[tuple[float, str]]  # when each line came, and its text
    code: int | None  # `None` if it hung
    seconds: float  # when it ended
    fault: float  # by `time.monotonic`


def read(path: Path) -> str:
    """Read a file; "" if there is none."""
    with suppress(OSError):
        return path.read_text()
    return ""


def run_job(
    command: Sequence[object], variables: Mapping[str, str], folder: Path, watch: Callable[[float], object] = float
) -> EndedJob:
    """Run a job in a folder until it ends or hangs; call `watch` now and then with the seconds since the fault.

    Its ranks write their process numbers to *.pid, and the time of the fault to `fault`.
    """
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        [*map(str, command)], env={**variables, "TMPDIR": str(folder)}, cwd=folder, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        began, out = time.monotonic(), job.stdout or ()
        reader = threading.Thread(target=lambda: lines.extend((time.monotonic(), line.rstrip()) for line in out))
        reader.start()
        fault, limit = began, began + _FAULT_SECONDS
        while job.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
            with suppress(ValueError):  # it has not come to it, or is writing
                fault = float(read(folder / "fault"))
                limit = fault + _HANG_SECONDS
                watch(time.monotonic() - fault)
        code, seconds = job.poll(), time.monotonic() - fault
        for pid in [job.pid, *(int(path.read_text()) for path in folder.glob("*.pid"))]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reader.join()
    return EndedJob([(max(0.0, at - fault), line) for at, line in lines], code, seconds, fault)
