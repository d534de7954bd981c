"""Start ranks again after they failed, until the program has ended: `mpidist run --max-restarts`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from mpidist.cli.launching import Launch
from mpidist.transport.text import count_text

__all__ = ["Limits", "Nodes", "start_until_done"]

_PREEMPTED: Final = 75  # the exit code of a program that has saved, and is to be continued
_TOLD: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
# By which a rank is ended from outside, or by the machine. MPICH's mpiexec returns the number, others 128 more.
_DEADLY: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_OF_KILLED: Final = {number + more for number in _DEADLY for more in (0, 128)}
_BY_THE_KERNEL: Final = 128  # `si_code` of Ctrl-C, which a terminal sends to the launcher, too


@final
class Limits(NamedTuple):
    """How often, and with how few ranks, a program is started again.

    Attributes:
        max_restarts: How often.
        min_ranks: With how few ranks; `None` keeps their number on each node.
    """

    max_restarts: int
    min_ranks: int | None


@final
class Nodes(NamedTuple):
    """The nodes on which ranks are started.

    Attributes:
        number: How many there are.
        find_lost: Returns the names of those that do not answer.
        folder: A folder that all of them see; `None` for that of temporary files.
    """

    number: int
    find_lost: Callable[[], list[str]]
    folder: Path | None


@final
class _End(NamedTuple):
    """How a start of the ranks ended.

    Attributes:
        code: The exit code of the launcher, or of the rank that ended the job.
        was_told: Whether this process was asked to end it, by a signal.
        was_killed: Whether a rank was ended by a signal.
        has_saved: Whether a checkpoint was saved.
        seconds: How long it took.
    """

    code: int
    was_told: bool
    was_killed: bool
    has_saved: bool
    seconds: float


def start_until_done(launch: Callable[[int, Sequence[str]], Launch], ranks: int, limits: Limits, nodes: Nodes) -> int:
    """Start ranks, again after each failure, and return the exit code.

    Args:
        launch: Returns the command for so many ranks, without these nodes.
        ranks: Number of ranks.
        limits: How often, and with how few ranks.
        nodes: Where.
    """
    plan = _Plan(ranks, limits, nodes)
    with tempfile.TemporaryDirectory(prefix=".mpidist-run-", dir=nodes.folder) as folder:
        while True:
            end = _run(launch(plan.ranks, plan.lost), plan.restarts, Path(folder))
            if not plan.goes_on_after(end):
                return end.code


@final
class _Plan:
    """With what a program is started next, and whether it is.

    A program that fails twice by an error of its own, and has saved nothing in between, would fail a third time.
    """

    def __init__(self, ranks: int, limits: Limits, nodes: Nodes) -> None:
        self._all, self._limits, self._nodes = ranks, limits, nodes
        self._has_failed = False
        self.restarts = 0
        self.ranks = ranks
        self.lost: list[str] = []

    def goes_on_after(self, end: _End) -> bool:
        """Choose what is next, and say so. Local."""
        if end.code == 0 or end.was_told:
            return False
        what = f"{count_text(self.ranks, 'rank')} ended with exit code {end.code} after {end.seconds:.0f} s"
        self.lost = self._nodes.find_lost()
        if self.lost:
            what += f"; no answer from {', '.join(self.lost)}"
        elif end.was_killed:
            what += "; a rank was killed"
        why_not = self._why_not(end)
        if not why_not:
            self.restarts += 1
            most = self._limits.max_restarts
            what += f"; restart {self.restarts} of at most {most}, with {count_text(self.ranks, 'rank')}"
        else:
            what += f"; not started again: {why_not}"
        print(f"mpidist run: {what}", file=sys.stderr, flush=True)
        return not why_not

    def _why_not(self, end: _End) -> str:
        """Choose the number of ranks, and return "", or return why the program is not started again."""
        is_error = not end.was_killed and not self.lost and end.code != _PREEMPTED
        if is_error and self._has_failed and not end.has_saved:
            return "it has failed twice without a new checkpoint in between, which is an error of the program"
        self._has_failed = is_error
        if self.restarts == self._limits.max_restarts:
            return f"it was started again {count_text(self.restarts, 'time')} already (--max-restarts)"
        if end.was_killed and not self.lost and self._limits.min_ranks is not None:
            self._all -= self._all > self._limits.min_ranks
        self.ranks = self._all * (self._nodes.number - len(self.lost)) // self._nodes.number
        if self.ranks < (self._limits.min_ranks or 1):
            return f"{self.ranks} ranks are left, and at least {self._limits.min_ranks or 1} needed (--min-ranks)"
        return ""


def _run(launch: Launch, restarts: int, folder: Path) -> _End:
    """Start the launcher, pass on the signals that this process gets, and wait for its end."""
    code_file, saved = folder / "exit-code", folder / "saved"
    for file in (code_file, saved):
        file.unlink(missing_ok=True)
    own = {"MPIDIST_RESTARTS": restarts, "MPIDIST_EXIT_CODE_FILE": code_file, "MPIDIST_SAVED_FILE": saved}
    began = time.monotonic()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD | {signal.SIGCHLD})
    try:
        launcher = subprocess.Popen(
            launch.command,
            env=os.environ | launch.variables | {name: str(value) for name, value in own.items()},
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        was_told = False
        while launcher.poll() is None:
            said = signal.sigwaitinfo(_TOLD | {signal.SIGCHLD})
            if said.si_signo != signal.SIGCHLD:
                was_told = True
                if said.si_code != _BY_THE_KERNEL:
                    launcher.send_signal(said.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
    was_killed = code in _OF_KILLED and not code_file.exists()
    if code_file.exists():
        code = int(code_file.read_text())
    return _End(code, was_told, was_killed, saved.exists(), time.monotonic() - began)
