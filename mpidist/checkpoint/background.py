"""Writes a checkpoint in a thread, which makes no call of MPI: ranks see each other's files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Final, final

from mpidist.checkpoint.folder_lock import release_all
from mpidist.checkpoint.parts import part_of_rank
from mpidist.checkpoint.saving import Save, SaveRecord
from mpidist.transport.failures import open_groups
from mpidist.transport.text import text_of

__all__ = ["BackgroundWriting"]

logger = logging.getLogger("mpidist.checkpoint")

_FAILED: Final = ".failed"  # how the file ends that tells of a rank's failure
_POLL_SECONDS: Final = 0.01
_TELL_SECONDS: Final = 1.0  # of waiting before the job ends, after which a warning says why


@final
class BackgroundWriting(Thread):
    """Writes a save without MPI: rank 0 waits for the files of the other ranks, and publishes.

    An error that ends the job waits `grace_seconds` for it; `keep` then copies the files to this node's memory. `error`
    is what went wrong, and `record` what the save has cost, once `is_done`: `is_alive` may be wrong after a `join` that
    was interrupted.
    """

    def __init__(self, save: Save, grace_seconds: float, keep: Callable[[Save], None] | None = None) -> None:
        super().__init__(name="mpidist.checkpoint")
        self.error: Exception | None = None
        self.record: SaveRecord | None = None
        self.is_done = False
        self._has_written = Event()
        self.save, self._grace_seconds, self._keep = save, grace_seconds, keep
        self._blocked_seconds = time.perf_counter() - save.began
        _under_way.add(self)

    def run(self) -> None:
        """Write; see `Thread`."""
        save = self.save
        try:
            save.write_part()
            self._has_written.set()
            _wait_for_parts(save)
            save.publish()
            self.record = save.record(self._blocked_seconds)
        except Exception as problem:  # of any kind: `CheckpointManager.wait` raises it
            self.error = problem
            logger.error("mpidist: the checkpoint %s is not written: %s", save.place, text_of(problem))
            _tell_failure(save, problem)
        finally:
            save.release()
            save.part = None  # whose memory is needed no longer
            self.is_done = True
            self._has_written.set()
        if self._keep is not None and self.error is None:
            until = time.monotonic() + save.limit_seconds
            while self.is_under_way() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            if not save.folder.is_dir():  # else another rank has failed, and the copies from before stay
                self._keep(save)

    def join_in_time(self) -> None:
        """Wait until this rank's files are written, and raise what went wrong: `TimeoutError` if it took too long."""
        limit = self.save.limit_seconds
        if self._has_written.wait(limit):
            self.join(2 * limit)  # within the first half rank 0 names the rank whose files are missing
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise TimeoutError(
                f"the files of rank {self.save.rank} in {str(self.save.folder)!r} are not written after "
                f"{limit:g} s (MPIDIST_IO_TIMEOUT): does the file system answer?"
            )

    def is_under_way(self) -> bool:
        """Whether ranks still write, as far as this one sees."""
        folder = self.save.folder
        return not self.is_done or (folder.is_dir() and not any(folder.glob(f"*{_FAILED}")))

    def forget(self) -> None:
        """Note that all ranks have waited for the writing."""
        _under_way.discard(self)

    def wait_before_abort(self) -> None:
        """Wait until the checkpoint is in its place, for a while."""
        begun = time.monotonic()
        has_told = False
        while self.is_under_way() and (waited := time.monotonic() - begun) < self._grace_seconds:
            if waited > _TELL_SECONDS and not has_told:
                has_told = True
                place, left = self.save.place, self._grace_seconds - waited
                logger.warning("mpidist: the job ends when %s is written, or in %.0f s", place, left)
            time.sleep(0.05)


_under_way: Final[set[BackgroundWriting]] = set()  # writings that not all ranks have waited for


def _finish_before_abort() -> None:
    """Wait until threads have written the saves, and leave no lock to the next job."""
    for writing in tuple(_under_way):
        writing.wait_before_abort()
    release_all()


open_groups.before_abort.append(_finish_before_abort)


def _wait_for_parts(save: Save) -> None:
    """Wait for the files of all ranks, on rank 0."""
    if save.rank != 0:
        return
    until = time.monotonic() + save.limit_seconds
    for name in save.all_parts:
        while not (save.folder / f"{name}.json").exists():
            failed = save.folder / f"{name}{_FAILED}"
            if failed.exists():
                raise OSError(f"{name} could not write its part: {failed.read_text()}")
            if not save.folder.is_dir():
                raise FileNotFoundError(f"{str(save.folder)!r} was removed while ranks wrote into it")
            if time.monotonic() > until:
                raise TimeoutError(f"the part {name} did not come within {save.limit_seconds:g} s (MPIDIST_IO_TIMEOUT)")
            time.sleep(_POLL_SECONDS)


def _tell_failure(save: Save, error: Exception) -> None:
    """Report the failure to rank 0, which waits for this rank's files."""
    with suppress(OSError):  # then rank 0 waits until its deadline
        (save.folder / f"{part_of_rank(save.rank)}{_FAILED}").write_text(text_of(error))
