"""Numbered checkpoints in a folder: the newest is restored, and old ones are removed."""

from __future__ import annotations

import logging
import operator
import os
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.files import recover_all, remove_leftovers, withdraw
from mpidist.checkpoint.saving import (
    ADVICE,
    CALL,
    BackgroundWriting,
    CopyMemory,
    capture,
    discard,
    folders_under_way,
    write_together,
)
from mpidist.context_stack import parts_of
from mpidist.errors import DataLossError
from mpidist.whole_number import require_bool, whole_number

__all__ = ["CheckpointManager"]

logger = logging.getLogger("mpidist.checkpoint")

_MAX_DIGITS: Final = 18  # of a number, which is sent as 64 bits


@final
class CheckpointManager:
    """Keeps the last checkpoints in a folder. A program that goes on where it was::

        manager = mpidist.checkpoint.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
        manager.restore_or_initialize()
        while checkpoint.epoch < 100:
            ...
            checkpoint.epoch += 1
            manager.save(checkpoint.epoch)

    Args:
        checkpoint: What is saved.
        directory: The folder; made when it is needed. Equal on all ranks.
        max_to_keep: How many checkpoints are kept; `None` for all.
        checkpoint_name: How the names of the checkpoints begin.
        background: Whether `save` returns as soon as it has copied the state, and a thread writes the copy. The thread
            makes no call of MPI. The manager keeps the memory of the copy for the next one.

    Attributes:
        checkpoint: As given.
        directory: As given.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If `max_to_keep` is less than 1, or the name is no name of a folder.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        checkpoint_name: str = "ckpt",
        background: bool = False,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"CheckpointManager takes a Checkpoint, got {checkpoint!r}")
        if max_to_keep is not None:
            whole_number("max_to_keep", max_to_keep, 1, "None for all")
        require_bool("background", background)
        if not isinstance(checkpoint_name, str):
            raise TypeError(f"checkpoint_name must be a text, got {checkpoint_name!r}")
        if not re.fullmatch(r"[\w-][\w.-]*", checkpoint_name):
            raise ValueError(f"checkpoint_name is for letters, digits, '_', '-' and '.', got {checkpoint_name!r}")
        self.checkpoint, self.directory = checkpoint, str(directory)
        self._max_to_keep, self._name = max_to_keep, checkpoint_name
        self._copies = CopyMemory() if background else None
        self._writing: BackgroundWriting | None = None
        self._has_removed_leftovers = False

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints that this rank sees in the folder, oldest first. Local."""
        return [str(self._place(number)) for number in self._numbers()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint that this rank sees in the folder, or `None`. Local."""
        return next(reversed(self.checkpoints), None)

    latest = latest_checkpoint

    def save(self, checkpoint_number: int | None = None) -> str:
        """Save a checkpoint, and remove what is too old. Collective; of parameter servers, local to the chief.

        Args:
            checkpoint_number: The number, such as the step, at least 0, below 10**18 and equal on all ranks; by default
                one more than that of the newest.

        Returns:
            The path of the checkpoint.

        Raises:
            TypeError: If the number is no whole number. On every rank that passes it.
            ValueError: If the number is out of these bounds. On every rank that passes it.
            InvalidArgumentError: If another rank passes such a number, if ranks save different things, or if one cannot
                read its state. On every rank.
            OSError: If a rank cannot write, or could not write the checkpoint before, in the background. On every rank.
        """
        self.wait()
        given = self._next_number() if checkpoint_number is None else checkpoint_number
        number, error = 0, None
        try:
            number = _checked(given)
        except (TypeError, ValueError) as problem:  # the other ranks must learn of it
            error = problem
        place, strategy = self._place(number), self.checkpoint.strategy
        snapshot = capture(strategy, place, self.checkpoint.items(), self._copies, {"number": number}, error)
        finish = partial(self._remove_old, snapshot.place.parent, number)
        if self._copies is not None:
            self._writing = BackgroundWriting(snapshot, finish)
            self._writing.start()
        else:
            write_together(strategy, snapshot, finish)
        return str(place)

    def wait(self) -> None:
        """Wait until this rank's files of the last `save` are written. Collective if `background` is true.

        After the strategy is closed it is local, and raises what went wrong on this rank.

        Raises:
            OSError: If a rank could not write. On every rank.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        extended: Any = parts_of(self.checkpoint.strategy)
        try:
            together = extended.raise_together("writing a checkpoint in the background")
            with together if _is_open(extended) else nullcontext():
                writing.join()
                if writing.error is not None:
                    raise writing.error
        except Exception:
            if _is_open(extended):  # else other ranks may still write
                discard(writing.snapshot)
            raise
        finally:
            if not writing.is_done:  # the wait was interrupted, and the thread still writes the copy
                self._copies = CopyMemory()

    def restore_or_initialize(self, *, skip_broken: bool = False) -> str | None:
        """Restore the newest checkpoint, if there is one. Collective.

        Args:
            skip_broken: Whether to take the one before where files are missing or damaged, with a warning.

        Returns:
            The path of the checkpoint; `None` if there is none, so that the program begins.

        Raises:
            DataLossError: If files are missing or damaged. On every rank.
            ValueError: As `Checkpoint.restore` does.
        """
        self.wait()
        before: int | None = None
        while (number := self._newest(before)) is not None:
            place = self._place(number)
            try:
                self.checkpoint.restore(place)
            except DataLossError as error:
                if not skip_broken:
                    hint = "restore_or_initialize(skip_broken=True) takes the one before, if there is one"
                    raise _with_text(error, f"{error}; {hint}") from error.__cause__
                extended: Any = parts_of(self.checkpoint.strategy)
                if extended.group.topology.rank == 0:
                    logger.warning("mpidist: the checkpoint %s is passed over: %s", place, error)
                before = number
            else:
                return str(place)
        return None

    def _place(self, number: int) -> Path:
        return Path(self.directory) / f"{self._name}-{number}"

    def _numbers(self, directory: Path | None = None) -> list[int]:
        pattern = re.compile(rf"{re.escape(self._name)}-(0|[1-9]\d{{0,{_MAX_DIGITS - 1}}})")
        try:
            names = os.listdir(self.directory if directory is None else directory)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))

    def _next_number(self) -> int:
        newest = self._newest(None, CALL)
        return 1 if newest is None else newest + 1

    def _newest(self, before: int | None, what: str = "restore of a checkpoint") -> int | None:
        """Return the largest number that rank 0 sees, or the largest one before another. Collective."""
        extended: Any = parts_of(self.checkpoint.strategy)
        extended.require_cross_replica(what)
        newest = -1
        with extended.raise_together(f"{what} in {self.directory!r}", advice=ADVICE if what == CALL else ""):
            if extended.group.topology.rank == 0:
                recover_all(Path(self.directory), self._name)
                numbers = [number for number in self._numbers() if before is None or number < before]
                newest = max(numbers, default=-1)
        newest = int(extended.cross_device_ops.broadcast(np.int64(newest), "all", call=what))
        return None if newest < 0 else newest

    def _remove_old(self, directory: Path, newest: int) -> None:
        """Remove checkpoints that are too many, but not the one that was just saved, and what killed jobs have left.

        Args:
            directory: The folder; absolute, as the program may be in another one by now.
            newest: The number of the checkpoint that was just saved.
        """
        if not self._has_removed_leftovers:  # later ones are of a job that still runs
            remove_leftovers(directory, self._name, folders_under_way())
            self._has_removed_leftovers = True
        if self._max_to_keep is not None:
            kept = [number for number in self._numbers(directory) if number != newest]
            for number in kept[: max(len(kept) + 1 - self._max_to_keep, 0)]:
                withdraw(directory / self._place(number).name)


def _with_text(error: DataLossError, text: str) -> DataLossError:
    """Make an error like one of all ranks, marked alike, with another text."""
    another = DataLossError(text)
    vars(another).update(vars(error))
    return another


def _checked(number: Any) -> int:
    """Return what a program passes as the number of a checkpoint as an int; raise if it is none."""
    checked = whole_number("checkpoint_number", _indexed(number), 0)
    if checked >= 10**_MAX_DIGITS:
        raise ValueError(f"checkpoint_number must be below 10**{_MAX_DIGITS}, got {checked}")
    return checked


def _indexed(number: Any) -> Any:
    """Return what is used as a whole number, such as an integer variable, as an int; anything else as it is."""
    if isinstance(number, (bool, np.bool_)):
        return number
    try:
        return operator.index(number)
    except TypeError:
        return number


def _is_open(extended: Any) -> bool:
    """Whether ranks can still make calls together."""
    try:
        extended.group.require_open("wait()")
    except RuntimeError:
        return False
    return True
