"""Leave before the job is ended: all ranks save together after the same step, and end with the code for "try again"."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, TypeVar, final

from mpidist.checkpoint.manager import CheckpointManager, save_or_raise
from mpidist.context_stack import parts_of
from mpidist.transport.agreement.fingerprint import StopNotice
from mpidist.transport.failures import job_abort
from mpidist.transport.shared_errors import mark_shared
from mpidist.whole_number import whole_number

__all__ = ["PreemptionCheckpointHandler"]

logger = logging.getLogger("mpidist.checkpoint")

_T = TypeVar("_T")
_CALL: Final = "check for preemption"
_END_OF_JOB: Final = "SLURM_JOB_END_TIME"
_TRY_AGAIN: Final = 75  # EX_TEMPFAIL
_STEPS_PER_ROUND: Final = 16  # where a step makes no calls, or they carry no notice
_MOST_GRACE: Final = 0.1  # of the time that is left, so that a short job makes steps, too


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint and ends the program when the job is to be preempted, after the same step on all ranks::

        manager = mpidist.checkpoint.CheckpointManager(checkpoint, "checkpoints")
        handler = mpidist.experimental.PreemptionCheckpointHandler(manager)
        manager.restore_or_initialize()
        while checkpoint.step < 1000:
            handler.run(train_step)
            checkpoint.step += 1

    A signal to any rank, or the end of its time, is a notice, which goes to the other ranks with the next call that all
    ranks make anyway; so a step costs no message more. The ranks stop at their next step: they save, wait until all is
    written, and raise `SystemExit`, without ending the job for each other. A second signal changes nothing. After the
    last step nothing is stopped: a program that works on for long calls `save_checkpoint_if_preempted` now and then.

    Make one on every rank, in the main thread. A handler that the program has set for a signal before is called, too.
    The flight recorder gives up a signal that is named here.

    Args:
        manager: The manager, which saves.
        signals: The signals that announce the end, such as those of `sbatch --signal`.
        exit_code: The program's exit code; 75 is EX_TEMPFAIL, "try again".
        time_limit_seconds: How long this object lives before the ranks leave; by default until the end of the Slurm
            job, `SLURM_JOB_END_TIME`, if there is one that has not passed, less `grace_seconds`.
        grace_seconds: How long before the end of the Slurm job the ranks leave; at most a tenth of what is left now.
        checkpoint_number: Returns the number of the checkpoint; by default it is one more than the largest.

    Attributes:
        total_run_calls: How often `run` was called by this process.

    Raises:
        TypeError: If `manager` is no `CheckpointManager`, or `exit_code` no whole number.
        ValueError: If the manager's strategy has parameter servers, or an argument is out of its range.
        RuntimeError: In another thread than the main one, which alone can handle signals.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        exit_code: int = _TRY_AGAIN,
        time_limit_seconds: float | None = None,
        grace_seconds: float = 120.0,
        checkpoint_number: Callable[[], int] | None = None,
    ) -> None:
        exit_code = whole_number("exit_code", exit_code, 0)  # Python ends with 1 for a number of another type
        _require_valid(manager, exit_code, time_limit_seconds, grace_seconds)
        self.total_run_calls = 0
        self._manager, self._signals, self._exit_code = manager, _checked(signals), exit_code
        self._checkpoint_number = checkpoint_number
        self._extended: Any = parts_of(manager.checkpoint.strategy)
        self._rank: int = self._extended.group.topology.rank
        self._end = _end_of_time(time_limit_seconds, grace_seconds, warns=self._rank == 0)
        self._reason, self._sequence = "", -1  # `_sequence`: the last call before the latest 16 steps
        self._handlers_before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        for number in self._signals:
            job_abort.release_signal(number)
            before = signal.signal(number, self._take_signal)
            if callable(before) and before is not signal.default_int_handler:
                self._handlers_before[number] = before

    def run(self, fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Make one step: call `fn`, unless the ranks stop before this step. Every rank calls it for every step.

        The checkpoint is saved *before* `fn` is called, so what a program counts after `run` is in it. Draw the step's
        batch in `fn`: one that was drawn before counts as seen.

        Args:
            fn: The step. A notice goes with its collective calls; if there are none, with a call in every 16th step.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What `fn` returns.

        Raises:
            SystemExit: If the ranks stop. On every rank, after the checkpoint is written.
            OSError: If it could not be written. On every rank.
        """
        self.save_checkpoint_if_preempted()
        self.total_run_calls += 1
        return fn(*args, **kwargs)

    def save_checkpoint_if_preempted(self) -> None:
        """Save and leave if the ranks stop here: for loops without `run`. Every rank calls it once a step.

        Call it where the checkpoint is that of a whole step, such as at the end of the loop's body.

        Raises:
            SystemExit: If the ranks stop. On every rank, after the checkpoint is written.
            OSError: If it could not be written. On every rank.
        """
        agreement = self._extended.group.agreement
        notice = agreement.notice  # of all handlers of the strategy, also of one whose loop is over
        notice.step += 1
        if not self._reason and self._end is not None and time.monotonic() > self._end:
            self._reason = f"the end of the time on rank {self._rank}"
        if self._reason:  # again, as `reset` makes a new notice
            notice.give(self._reason)
        if notice.reason and self._extended.group.topology.size == 1:
            notice.decide([(notice.step - 1, notice.reason)])
        if notice.stop_step is not None and notice.step >= notice.stop_step:
            self._leave(notice.reason)
        calls = self._extended.group.calls
        if notice.step % _STEPS_PER_ROUND == 1:
            self._sequence = calls.last_made()
        if notice.step % _STEPS_PER_ROUND == 0:
            has_carrier = agreement.compares_all_calls and calls.last_made() != self._sequence
            if not has_carrier:
                self._extended.agree(_CALL, {}, variant=1)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._reason:
            self._reason = f"{_name_of(number)} on rank {self._rank}"
            self._extended.group.agreement.notice.give(self._reason)  # with the next call, in this step
        if number in self._handlers_before:
            self._handlers_before[number](number, frame)

    def _leave(self, reason: str) -> None:
        """Save on all ranks, and end the program. Collective."""
        try:
            self._manager.wait()
        except OSError as error:  # of an earlier save, in the background: this one may succeed
            if self._rank == 0:
                logger.warning("mpidist: an earlier checkpoint was not written: %s", error)
        number = None if self._checkpoint_number is None else self._checkpoint_number()
        path = save_or_raise(self._manager, number)  # else the job would go on from an old one, to fail here again
        for number in self._signals:  # the program ends as it should
            signal.signal(number, signal.SIG_IGN)
        if self._rank == 0:
            logger.warning("mpidist: %s: saved %s, leaving with exit code %d", reason, path, self._exit_code)
        self._reason = ""
        self._extended.group.agreement.notice = StopNotice()  # for a program that goes on nevertheless
        leaving = SystemExit(self._exit_code)
        mark_shared(leaving, self._extended.group.agreement.ranks)
        raise leaving


def _checked(signals: Any) -> tuple[int, ...]:
    """Return signals as a tuple, if a program can handle all of them."""
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if not isinstance(signals, Iterable) or not catchable.issuperset(numbers := tuple(signals)):
        raise ValueError(f"signals must be signals that a program can handle, as [signal.SIGTERM], got {signals!r}")
    return numbers


def _require_valid(manager: Any, exit_code: int, time_limit_seconds: float | None, grace_seconds: float) -> None:
    if not isinstance(manager, CheckpointManager):
        raise TypeError(f"PreemptionCheckpointHandler takes a CheckpointManager, got {manager!r}")
    if not parts_of(manager.checkpoint.strategy).peers.is_in_lock_step:
        raise ValueError(
            "PreemptionCheckpointHandler is for ranks in lock step, and got a strategy with parameter servers: there "
            "the chief saves by manager.save() when a signal came"
        )
    if exit_code > 255:
        raise ValueError(f"exit_code must be 0 to 255, got {exit_code}")
    if time_limit_seconds is not None and not time_limit_seconds >= 0:
        raise ValueError(f"time_limit_seconds must be at least 0, or None, got {time_limit_seconds}")
    if not grace_seconds >= 0:
        raise ValueError(f"grace_seconds must be at least 0, got {grace_seconds}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("PreemptionCheckpointHandler must be made in the main thread, which alone handles signals")


def _name_of(number: int) -> str:
    """Name a signal; those for real time have numbers alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_of_time(time_limit_seconds: float | None, grace_seconds: float, warns: bool) -> float | None:
    """Return when to leave, in seconds of the monotonic clock; `None` for never.

    An end of the Slurm job that has passed is none: the variable is that of an old allocation, or the limit was raised.
    """
    if time_limit_seconds is not None:
        return time.monotonic() + time_limit_seconds
    text = os.environ.get(_END_OF_JOB, "")
    if not text.isdecimal():
        return None
    left = int(text) - time.time()
    if left <= 0:
        if warns:
            logger.warning(
                "mpidist: %s=%s has passed, so it is no time limit: it is that of an old allocation, or the limit was "
                "raised since; time_limit_seconds= sets one",
                _END_OF_JOB,
                text,
            )
        return None
    return time.monotonic() + left - min(grace_seconds, _MOST_GRACE * left)
