"""Start ranks again after they failed, until the program has ended: `mpidist run --max-restarts`."""

from __future__ import annotations

import ctypes
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

_PREEMPTED: Final = 75  # the exit code of a program that has saved, and is to be continued later
_ENDING: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_FORWARDED: Final = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
# From outside, as by the kernel without memory. MPICH's mpiexec returns the number of the signal, others 128 more.
_OF_KILLED: Final = {number + more for number in (signal.SIGKILL, signal.SIGTERM) for more in (0, 128)}
_BY_THE_KERNEL: Final = 128  # `si_code` of Ctrl-C, which a terminal sends to the launcher, too
_PARENT_DEATH: Final = 1  # PR_SET_PDEATHSIG


@final
class Limits(NamedTuple):
    """How often, and with how few ranks, a program is started again.

    Attributes:
        max_restarts: How often.
        min_ranks: With how few ranks; `None` keeps the number on each node.
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
        told: The signals that this process got meanwhile, and forwarded.
        was_killed: Whether a rank was killed from outside.
        has_saved: Whether a checkpoint was saved.
        seconds: How long it took.
    """

    code: int
    told: frozenset[signal.Signals]
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
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    forwarded = _FORWARDED - ({signal.SIGHUP} if is_ignored else set())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded | {signal.SIGCHLD})
    try:
        with tempfile.TemporaryDirectory(prefix=".mpidist-run-", dir=nodes.folder) as folder:
            while True:
                end = _run(launch(plan.ranks, plan.lost), plan.restarts, Path(folder), forwarded)
                if not plan.goes_on_after(end):
                    return end.code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        if end.code == 0:
            return False
        what = f"{count_text(self.ranks, 'rank')} ended with exit code {end.code} after {end.seconds:.0f} s"
        if end.was_killed:
            what += "; a rank was killed"
        why_not = self._why_to_end(end)
        if not why_not:
            before, self.lost = self.lost, self._nodes.find_lost()
            if self.lost:
                what += f"; no answer from {', '.join(self.lost)}"
            why_not = self._why_not(end, is_node_lost=not {*self.lost} <= {*before})
        if not why_not:
            self.restarts += 1
            most = self._limits.max_restarts
            what += f"; restart {self.restarts} of at most {most}, with {count_text(self.ranks, 'rank')}"
        else:
            what += f"; not started again: {why_not}"
        print(f"mpidist run: {what}", file=sys.stderr, flush=True)
        return not why_not

    def _why_to_end(self, end: _End) -> str:
        """Return why this end is wanted, or ""."""
        if end.told & _ENDING:
            return f"{min(end.told & _ENDING).name} has come"
        if end.code == _PREEMPTED and (end.told or end.has_saved):
            return "it has saved, and is to be continued later"
        if self.restarts == self._limits.max_restarts:
            return f"it was started again {count_text(self.restarts, 'time')} already (--max-restarts)"
        return ""

    def _why_not(self, end: _End, is_node_lost: bool) -> str:
        """Choose the number of ranks, and return "", or return why the program is not started again."""
        is_error = not end.was_killed and not is_node_lost
        if is_error and self._has_failed and not end.has_saved:
            return "it has failed twice without a new checkpoint in between, which is an error of the program"
        self._has_failed = is_error
        least = self._limits.min_ranks
        if end.was_killed and not is_node_lost and least is not None:
            self._all -= self._all > least
        on_each = -(-self._all // self._nodes.number)
        self.ranks = min(self._all, on_each * (self._nodes.number - len(self.lost)))
        if self.ranks < (least or 1):
            needed = f", and --min-ranks is {least}" if least else ""
            return f"there are nodes for {count_text(self.ranks, 'rank')}{needed}"
        return ""


def _run(launch: Launch, restarts: int, folder: Path, forwarded: set[signal.Signals]) -> _End:
    """Start the launcher, forward the signals that come, which are blocked here, and wait for its end."""
    saved = folder / "saved"
    code_file = Path(os.environ.get("MPIDIST_EXIT_CODE_FILE") or folder / "exit-code")
    for file in (code_file, saved):
        file.unlink(missing_ok=True)
    own = {"MPIDIST_RESTARTS": restarts, "MPIDIST_EXIT_CODE_FILE": code_file, "MPIDIST_SAVED_FILE": saved}
    environment = os.environ | launch.variables | {name: str(value) for name, value in own.items()}
    began, told = time.monotonic(), set()
    launcher = subprocess.Popen(launch.command, env=environment, preexec_fn=_prepare_child)
    while launcher.poll() is None:
        said = signal.sigwaitinfo(forwarded | {signal.SIGCHLD})
        if said.si_signo != signal.SIGCHLD:
            told.add(signal.Signals(said.si_signo))
            if said.si_code != _BY_THE_KERNEL:
                launcher.send_signal(said.si_signo)
    code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
    text = code_file.read_text().strip() if code_file.exists() else ""
    was_killed = code in _OF_KILLED and not text
    return _End(int(text or code), frozenset(told), was_killed, saved.exists(), time.monotonic() - began)


def _prepare_child() -> None:
    """Let a new process get all signals, and end with this one."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
