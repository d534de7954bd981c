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
from mpidist.checkpoint.record import SaveRecord
from mpidist.checkpoint.saving import Snapshot, publish_folder, write_parts
from mpidist.transport.failures import open_groups
from mpidist.transport.text import text_of

__all__ = ["FAILED", "BackgroundWriting"]

logger = logging.getLogger("mpidist.checkpoint")

FAILED: Final = ".failed"  # how the file ends that tells of a rank's failure
_TELL_SECONDS: Final = 1.0  # of waiting before the job ends, after which a warning says why


@final
class BackgroundWriting(Thread):
    """Writes a snapshot without MPI: rank 0 waits for the files of the other ranks, and publishes.

    Args:
        snapshot: What this rank writes.
        grace_seconds: How long an error that ends the job waits for the writing, at most.
        keep: Copies what is written to the memory of this node.

    Attributes:
        snapshot: As given.
        error: What went wrong, or `None`.
        record: What the save has cost; `None` until it is over.
        is_done: Whether it has written or failed; `is_alive` may be wrong after a `join` that was interrupted.
    """

    def __init__(
        self, snapshot: Snapshot, grace_seconds: float, keep: Callable[[Snapshot], None] | None = None
    ) -> None:
        super().__init__(name="mpidist.checkpoint")
        self.error: Exception | None = None
        self.record: SaveRecord | None = None
        self.is_done = False
        self._has_written = Event()
        self.snapshot, self._grace_seconds, self._keep = snapshot, grace_seconds, keep
        self._blocked_seconds = time.perf_counter() - snapshot.began
        _under_way.add(self)

    def run(self) -> None:
        """Write; see `Thread`."""
        snapshot = self.snapshot
        try:
            write_parts(snapshot)
            self._has_written.set()
            _wait_for_parts(snapshot)
            publish_folder(snapshot)
            self.record = SaveRecord.of(snapshot, self._blocked_seconds)
        except Exception as problem:  # of any kind: `CheckpointManager.wait` raises it
            self.error = problem
            logger.error("mpidist: the checkpoint %s is not written: %s", snapshot.place, text_of(problem))
            _tell_failure(snapshot, problem)
        finally:
            snapshot.save_place.release()
            self.snapshot = snapshot._replace(part=None)  # whose memory is needed no longer
            self.is_done = True
            self._has_written.set()
        if self._keep is not None and self.error is None:
            self._keep(self.snapshot)

    def join_in_time(self) -> None:
        """Wait until this rank's files are written, and raise what went wrong.

        Raises:
            TimeoutError: If it takes longer than files may.
            Exception: What went wrong.
        """
        limit = self.snapshot.limit_seconds
        if self._has_written.wait(limit):
            self.join(2 * limit)  # within the first half rank 0 names the rank whose files are missing
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise TimeoutError(
                f"the files of rank {self.snapshot.rank} in {str(self.snapshot.folder)!r} are not written after "
                f"{limit:g} s (MPIDIST_IO_TIMEOUT): does the file system answer?"
            )

    def is_under_way(self) -> bool:
        """Whether ranks still write, as far as this one sees."""
        folder = self.snapshot.folder
        return not self.is_done or (folder.is_dir() and not any(folder.glob(f"*{FAILED}")))

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
                place, left = self.snapshot.place, self._grace_seconds - waited
                logger.warning("mpidist: the job ends when %s is written, or in %.0f s", place, left)
            time.sleep(0.05)


_under_way: Final[set[BackgroundWriting]] = set()  # writings that not all ranks have waited for


def _finish_before_abort() -> None:
    """Let threads write what `save` has returned, and leave no lock to the next job."""
    for writing in tuple(_under_way):
        writing.wait_before_abort()
    release_all()


open_groups.call_before_abort(_finish_before_abort)


def _wait_for_parts(snapshot: Snapshot) -> None:
    """Wait for the files of all ranks, on rank 0."""
    if snapshot.rank != 0:
        return
    until = time.monotonic() + snapshot.limit_seconds
    for name in snapshot.all_parts:
        while not (snapshot.folder / f"{name}.json").exists():
            failed = snapshot.folder / f"{name}{FAILED}"
            if failed.exists():
                raise OSError(f"{name} could not write its part: {failed.read_text()}")
            if not snapshot.folder.is_dir():
                raise FileNotFoundError(f"{str(snapshot.folder)!r} was removed while ranks wrote into it")
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the part {name} did not come within {snapshot.limit_seconds:g} s (MPIDIST_IO_TIMEOUT)"
                )
            time.sleep(0.01)


def _tell_failure(snapshot: Snapshot, error: Exception) -> None:
    """Let rank 0 know, which waits for this rank's files."""
    with suppress(OSError):  # then rank 0 waits until its deadline
        (snapshot.folder / f"{part_of_rank(snapshot.rank)}{FAILED}").write_text(text_of(error))
