"""Numbered checkpoints in a folder: the newest is restored, and old ones are removed."""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from mpidist.checkpoint.background import BackgroundWriting
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.folder import MAX_DIGITS, CheckpointFolder, Retention
from mpidist.checkpoint.folder_lock import FolderLock
from mpidist.checkpoint.node_copies import NodeCopies
from mpidist.checkpoint.parts import require_writers
from mpidist.checkpoint.restoring import ADVICE, restore
from mpidist.checkpoint.restoring import CALL as RESTORE
from mpidist.checkpoint.saving import (
    CALL,
    CopyMemory,
    Save,
    SaveRecord,
    capture,
    require_on_difference,
    write_together,
)
from mpidist.context_stack import parts_of
from mpidist.errors import DataLossError, DeadlineExceededError, PeerFailedError
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.text import text_of
from mpidist.whole_number import require_bool, whole_number

__all__ = ["CheckpointManager", "save_or_raise"]

logger = logging.getLogger("mpidist.checkpoint")


@final
class CheckpointManager:
    """Keeps the last checkpoints in a folder. A program that continues from the last one::

        manager = mpidist.checkpoint.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
        manager.restore_or_initialize()
        while checkpoint.epoch < 100:
            ...
            checkpoint.epoch += 1
            manager.save(checkpoint.epoch)

    The newest checkpoint is the one that was saved last, whatever its number.

    From the first `save` until the strategy is closed, or the program ends, rank 0 holds a lock of the folder: the file
    `.ckpt.lock`, which names the job. Another job that saves there meanwhile gets an error. The lock of a job that is
    gone is taken over, with a warning: at once on the same machine, and on another one after two minutes without a sign
    of life. Reading needs no lock.

    Args:
        checkpoint: What is saved.
        directory: The folder; made when it is needed. Equal on all ranks.
        max_to_keep: How many checkpoints are kept, of those that were saved last; `None` for all.
        keep_every_n_steps: Checkpoints whose number is a multiple of it are kept beside these.
        keep_checkpoint_every_n_hours: Of those that `max_to_keep` would remove, the first is kept, and each that was
            saved at least so many hours after the one before that was kept.
        checkpoint_name: How the names of the checkpoints begin.
        background: Whether `save` returns as soon as it has copied the state, and a thread writes the copy. The thread
            makes no call of MPI. The manager keeps the memory of the copy for the next one.
        on_error: What `save` and `wait` do if files cannot be written, as on a full disk: `"raise"` an `OSError`, or
            `"warn"`, so that the training goes on; a program that is preempted raises. The checkpoints before are whole
            in both cases.
        on_difference: What `save` does if copies differ that should be equal, as in `Checkpoint.write`.
        writers: Which ranks write what is equal, as in `Checkpoint.write`.
        neighbour: Whether each node also keeps the newest checkpoint in its shared memory, if `mpidist run
            --max-restarts` has started the job: the parts of its own ranks, and of those of the node before it. Started
            again without one of its nodes, the job restores it from there. Costs the memory of these parts, and reading
            them once; when it is restored, that of the whole checkpoint on each node. Where that is more than half of
            the free memory of `/dev/shm`, a warning says so, and files are read. Not for parameter servers.
        grace_seconds: How long a job that an error ends waits until the thread has written what `save` has returned.

    Attributes:
        checkpoint: As given.
        directory: As given.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If `max_to_keep` is less than 1, or is `None` beside another number of those to keep, the name is no
            name of a folder, or another argument is out of its range.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        *,
        keep_every_n_steps: int | None = None,
        checkpoint_name: str = "ckpt",
        background: bool = False,
        on_error: str = "raise",
        on_difference: str = "raise",
        writers: int | str = "all",
        neighbour: bool = False,
        grace_seconds: float = 30.0,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"CheckpointManager takes a Checkpoint, got {checkpoint!r}")
        self._retention = Retention(max_to_keep, keep_every_n_steps, keep_checkpoint_every_n_hours)
        self._retention.require_valid()
        require_bool("background", background)
        require_bool("neighbour", neighbour)
        self._parts: StrategyParts = parts_of(checkpoint.strategy)
        if neighbour and not self._parts.peers.is_in_lock_step:
            raise ValueError("neighbour=True is not for parameter servers, whose chief alone writes checkpoints")
        if not isinstance(checkpoint_name, str):
            raise TypeError(f"checkpoint_name must be a text, got {checkpoint_name!r}")
        if not re.fullmatch(r"[\w-][\w.-]*", checkpoint_name):
            raise ValueError(f"checkpoint_name is for letters, digits, '_', '-' and '.', got {checkpoint_name!r}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error must be 'raise' or 'warn', got {on_error!r}")
        require_on_difference(on_difference)
        require_writers(writers)
        if not grace_seconds >= 0:
            raise ValueError(f"grace_seconds must be at least 0, got {grace_seconds}")
        self.checkpoint, self.directory = checkpoint, str(directory)
        self._absolute = Path(directory).resolve()  # also after `os.chdir`
        self._name, self._warns = checkpoint_name, on_error == "warn"
        self._on_node: NodeCopies | None = None
        if neighbour and "MPIDIST_SAVED_FILE" in os.environ:
            self._on_node = NodeCopies(self._parts, self._absolute, checkpoint_name)
        elif neighbour:
            logger.info("mpidist: no copies in memory, as `mpidist run --max-restarts` has not started this job")
        self._on_difference, self._writers, self._grace_seconds = on_difference, writers, grace_seconds
        self._copies = CopyMemory() if background else None
        self._writing: BackgroundWriting | None = None
        self._last_save: SaveRecord | None = None
        self._lock: FolderLock | None = None  # on rank 0, from the first save on

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints that this rank finds in the folder, the last one saved at the end. Local."""
        return [str(self._place(number)) for number in self._folder().orders()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The checkpoint that was saved last, of those that this rank sees in the folder, or `None`. Local."""
        return next(reversed(self.checkpoints), None)

    latest = latest_checkpoint

    @property
    def last_save(self) -> SaveRecord | None:
        """Record of this rank's last save that is whole; `None` before the first. Local. Rank 0 logs it, too (INFO)."""
        writing = self._writing
        if writing is None or writing.record is None or writing.save.folder.is_dir():  # other ranks write, or failed
            return self._last_save
        return writing.record

    def save(self, checkpoint_number: int | None = None) -> str:
        """Save a checkpoint, and remove old ones. Collective; of parameter servers, local to the chief.

        All ranks call it, and write. A warning reports once any checkpoints with
        larger numbers that another run has saved: they are older from now on.

        Args:
            checkpoint_number: The number, such as the step, at least 0, below 10**18 and equal on all ranks; by default
                one more than the largest in the folder.

        Returns:
            The path of the checkpoint; "" if it could not be written, and `on_error` is `"warn"`.

        Raises:
            TypeError: If the number is no whole number. On every rank that passes it.
            ValueError: If the number is out of these bounds. On every rank that passes it.
            InvalidArgumentError: If another rank passes such a number, if ranks save different things, if copies differ
                that should be equal, or if a rank cannot read its state. On every rank.
            OSError: If another job saves there, or a rank cannot write, or could not write the checkpoint before, in
                the background. On every rank.
        """
        self.wait()
        with self._warned_of():
            return self._save(checkpoint_number)
        return ""

    def _save(self, given: int | None) -> str:
        strategy, items, keep = self.checkpoint.strategy, self.checkpoint.items(), self._on_node and self._on_node.keep

        def make() -> Save:
            number = None if given is None else _checked(given)
            text = str(Path(self.directory) / f"{self._name}-{'<next>' if number is None else number}")
            return Save(self._parts, text, self._folder(), number)

        save = capture(strategy, make, items, self._copies, self._on_difference, self._writers)
        if save.lock is not None and save.lock is not self._lock:  # on rank 0: held until the strategy is closed
            self._lock = save.lock.held_again()
            self._parts.at_close.append(self._lock.release)
        if self._copies is not None:
            self._writing = BackgroundWriting(save, self._grace_seconds, keep)
            self._writing.start()
        else:
            self._last_save = write_together(strategy, save)
            if keep is not None:
                with self._parts.raise_together(CALL, "copying to memory", "", save.io_timeout_seconds):
                    keep(save)
        return str(self._place(save.about["number"]))

    @contextmanager
    def _warned_of(self) -> Iterator[None]:
        """Warn of files that cannot be written, if the program wants it: all ranks have the same error."""
        try:
            yield
        except (DataLossError, DeadlineExceededError, PeerFailedError):
            raise
        except OSError as error:
            if not self._warns:
                raise
            if self._parts.group.topology.rank == 0:
                logger.warning("mpidist: a checkpoint is not saved; the program continues: %s", text_of(error))

    def wait(self) -> None:
        """Wait until this rank's files of the last `save` are written. Collective if `background` is true.

        After the strategy is closed it is local, and raises what went wrong on this rank.

        Raises:
            OSError: If a rank could not write, unless `on_error` is `"warn"`. On every rank.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        limit = self._parts.options.timeout_seconds  # of calls: writing may take longer
        if limit:  # 0 is none
            limit = max(limit, 3 * writing.save.limit_seconds)  # as `join_in_time`
        together = self._parts.raise_together(
            "wait for a checkpoint", "writing it in the background", timeout_seconds=limit
        )
        with self._warned_of():
            try:
                with together if self._is_open() else nullcontext():
                    writing.join_in_time()
                self._last_save = writing.record
            except Exception:
                if self._is_open():  # else other ranks may still write
                    writing.save.discard()
                raise
            finally:
                if writing.is_done:
                    writing.forget()
                else:  # the wait was interrupted, and the thread still writes the copy
                    self._copies = CopyMemory()

    def restore_or_initialize(self, *, skip_broken: bool = False) -> str | None:
        """Restore the checkpoint that was saved last, if there is one. Collective.

        Args:
            skip_broken: Whether to take the one before where files are missing or damaged, with a warning.

        Returns:
            The path of the checkpoint; `None` if there is none, so that the program begins.

        Raises:
            DataLossError: If files are missing or damaged. On every rank.
            FileNotFoundError: If a rank does not find the files that rank 0 finds. On every rank.
            ValueError: As `Checkpoint.restore` does.
        """
        self.wait()
        self._parts.require_cross_replica(RESTORE)
        for number in reversed(self._parts.on_rank_0(RESTORE, ADVICE, lambda: list(self._folder().orders()))):
            place = self._folder().place(number)
            try:
                if not self._restore_copies(place):
                    self.checkpoint.restore(place)
            except DataLossError as error:
                if not skip_broken:
                    hint = "restore_or_initialize(skip_broken=True) takes the one before, if there is one"
                    another = DataLossError(f"{error}; {hint}")
                    vars(another).update(vars(error))  # marked alike, as one of all ranks
                    raise another from error.__cause__
                if self._parts.group.topology.rank == 0:
                    logger.warning("mpidist: the checkpoint %s is passed over: %s", place, error)
            else:
                return str(self._place(number))
        return None

    def _restore_copies(self, place: Path) -> bool:
        """Restore a checkpoint from copies in the memory of nodes. Collective; whether there were whole ones."""
        copies = None if self._on_node is None else self._on_node.complete(place)
        if copies is None:
            return False
        is_rank_0 = self._parts.group.topology.rank == 0
        try:
            restored = restore(self.checkpoint.strategy, place, self.checkpoint.items(), False, copies)
        except (DataLossError, FileNotFoundError, ValueError) as error:
            if is_rank_0:
                logger.warning("mpidist: copies of %s in memory are not restored, but the files: %s", place, error)
            return False
        for name, value in restored.items():
            setattr(self.checkpoint, name, value)
        if is_rank_0:
            logger.info("mpidist: %s is restored from the memory of nodes", place)
        return True

    def _place(self, number: object) -> Path:
        """Return where a checkpoint is: as the program named the folder, if it is still where it did so."""
        given = Path(self.directory)
        return (given if given.resolve() == self._absolute else self._absolute) / f"{self._name}-{number}"

    def _folder(self) -> CheckpointFolder:
        return CheckpointFolder(self._absolute, self._name, self._retention)

    def _is_open(self) -> bool:
        """Whether ranks can still make calls together."""
        try:
            self._parts.group.require_open("wait()")
        except RuntimeError:
            return False
        return True


def save_or_raise(manager: CheckpointManager, checkpoint_number: int | None) -> str:
    """Save, and wait until all is written; raise an `OSError` also where `on_error` is "warn". Collective."""
    warns, manager._warns = manager._warns, False
    try:
        path = manager.save(checkpoint_number)
        manager.wait()
    finally:
        manager._warns = warns
    return path


def _checked(number: Any) -> int:
    """Return the number of a checkpoint, which may be an integer variable, as an int; raise if it is none."""
    if not isinstance(number, (bool, np.bool_)):
        with suppress(TypeError):  # which `whole_number` raises
            number = operator.index(number)
    checked = whole_number("checkpoint_number", number, 0)
    if checked >= 10**MAX_DIGITS:
        raise ValueError(f"checkpoint_number must be below 10**{MAX_DIGITS}, got {checked}")
    return checked
