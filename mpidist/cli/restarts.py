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

from mpidist.cli.allocation import Allocation
from mpidist.cli.launching import Launch, RefusedError, prepare_child
from mpidist.transport.mpi.launcher_abort import FAILED, LOST_RANK, exit_code_file
from mpidist.transport.text import count_text

__all__ = ["start_until_done"]

_PREEMPTED: Final = 75  # the exit code of a program that has saved, and is to be continued later
_ENDING: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_FORWARDED: Final = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
# From outside, as by the kernel without memory. MPICH's mpiexec returns the bitwise OR of all exit statuses, and 15 is
# also an abort (6) beside ranks that mpiexec itself has killed (9); other launchers return 128 + the signal's number.
_OF_KILLED: Final = {signal.SIGKILL, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
_BY_THE_KERNEL: Final = 128  # `si_code` of Ctrl-C, which a terminal sends to the launcher, too


@final
class _End(NamedTuple):
    """End of a start of the ranks: by which exit code, after which signals to this process, and how many seconds.

    `was_killed`: whether a rank was killed from outside. `has_failed`: whether its code follows a call that failed.
    """

    code: int
    signals: frozenset[signal.Signals]
    was_killed: bool
    has_failed: bool
    has_saved: bool
    seconds: float


def start_until_done(
    launch: Callable[[int, Sequence[str]], Launch],
    ranks: int,
    allocation: Allocation,
    max_restarts: int,
    min_ranks: int | None,
) -> int:
    """Start ranks, again after each failure, and return the exit code. If nodes share the current folder, writes there.

    `launch` returns the command for so many ranks, without these nodes. After a killed rank there is one rank fewer,
    down to `min_ranks`; `None` keeps the number on each node.
    """
    plan = _Plan(ranks, allocation, max_restarts, min_ranks)
    forwarded = {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}  # nohup ignores one
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some parents leave it, it would never come
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded | {signal.SIGCHLD})
    try:
        where = Path.cwd() if allocation.spans_nodes else None
        with tempfile.TemporaryDirectory(prefix=".mpidist-run-", dir=where) as folder:
            while True:
                end = _run(launch(plan.ranks, plan.lost), plan.restarts, Path(folder), forwarded)
                if not plan.restart_after(end):
                    return end.code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@final
class _Plan:
    """Number of ranks and nodes of the next start.

    A program that fails twice by an error of its own, and has saved nothing in between, would fail a third time.
    """

    def __init__(self, ranks: int, allocation: Allocation, max_restarts: int, min_ranks: int | None) -> None:
        self._ranks_of_all_nodes, self._allocation = ranks, allocation
        self._max_restarts, self._min_ranks = max_restarts, min_ranks
        self._has_failed = False
        self.restarts = 0
        self.ranks = ranks
        self.lost: list[str] = []

    def restart_after(self, end: _End) -> bool:
        """Decide whether to start the ranks again, and print the decision."""
        if end.code == 0:
            return False
        what = f"{count_text(self.ranks, 'rank')} ended with exit code {end.code} after {end.seconds:.0f} s"
        if end.was_killed:
            what += "; a rank was killed"
        why_not = self._reason_to_stop(end)
        if not why_not:
            before, self.lost = self.lost, self._allocation.find_lost()
            if self.lost:
                what += f"; no answer from {', '.join(self.lost)}"
            why_not = self._plan_next(end, is_node_lost=not {*self.lost} <= {*before})
        if not why_not:
            self.restarts += 1
            what += f"; restart {self.restarts} of at most {self._max_restarts}, with {count_text(self.ranks, 'rank')}"
        else:
            what += f"; not started again: {why_not}"
        print(f"mpidist run: {what}", file=sys.stderr, flush=True)
        return not why_not

    def _reason_to_stop(self, end: _End) -> str:
        """Return why no restart follows, whatever is left of the nodes, or ""."""
        if end.signals & _ENDING:
            return f"received {min(end.signals & _ENDING).name}"
        if end.code == _PREEMPTED and not end.has_failed and (end.signals or end.has_saved):
            return "the program has saved its state, to be continued later"
        if self.restarts == self._max_restarts:
            return f"all restarts are used (--max-restarts {self._max_restarts})"
        return ""

    def _plan_next(self, end: _End, is_node_lost: bool) -> str:
        """Choose the number of ranks; return why no restart is possible, or ""."""
        is_error = not end.was_killed and not is_node_lost
        if is_error and self._has_failed and not end.has_saved:
            return "the program has failed twice without a new checkpoint in between"
        self._has_failed = is_error
        if end.was_killed and not is_node_lost and self._min_ranks is not None:
            self._ranks_of_all_nodes -= self._ranks_of_all_nodes > self._min_ranks
        num_nodes = len(self._allocation.nodes) or 1  # where none may be lost, they count as one
        on_each = -(-self._ranks_of_all_nodes // num_nodes)
        self.ranks = min(self._ranks_of_all_nodes, on_each * (num_nodes - len(self.lost)))
        if self.ranks < (self._min_ranks or 1):
            needed = f", and --min-ranks is {self._min_ranks}" if self._min_ranks else ""
            return f"the nodes that are left take {count_text(self.ranks, 'rank')}{needed}"
        return ""


def _run(launch: Launch, restarts: int, folder: Path, forwarded: set[signal.Signals]) -> _End:
    """Start the launcher, forward signals to it, which this process blocks, and wait for its end."""
    saved = folder / f"saved-{restarts}"  # ranks of an earlier start may live for a while without their launcher
    failed, lost = Path(f"{saved}{FAILED}"), Path(f"{saved}{LOST_RANK}")
    code_file = Path(exit_code_file(os.environ) or folder / f"exit-code-{restarts}")
    try:
        code_file.unlink(missing_ok=True)
    except OSError as error:
        raise RefusedError(f"{code_file} must be a file that can be removed, and is not: {error.strerror}") from None
    own = {"MPIDIST_RESTARTS": restarts, "MPIDIST_EXIT_CODE_FILE": code_file, "MPIDIST_SAVED_FILE": saved}
    environment = os.environ | launch.variables | {name: str(value) for name, value in own.items()}
    began, signals = time.monotonic(), set()
    launcher = subprocess.Popen(launch.command, env=environment, preexec_fn=prepare_child)
    while launcher.poll() is None:
        received = signal.sigwaitinfo(forwarded | {signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD:
            signals.add(signal.Signals(received.si_signo))
            if received.si_code != _BY_THE_KERNEL:
                launcher.send_signal(received.si_signo)
    code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
    text = code_file.read_text(errors="replace").strip() if code_file.is_file() else ""
    text = text if text.isdecimal() else ""  # something else has written there
    was_killed = code in _OF_KILLED and (not text or lost.exists())  # the code of a rank that misses another one
    seconds = time.monotonic() - began
    return _End(int(text or code), frozenset(signals), was_killed, failed.exists(), saved.exists(), seconds)
