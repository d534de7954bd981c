"""NCCL's errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.transport import cuda
from mpidist.transport.text import first_line

__all__ = ["translated"]

_REMOTE: Final = (2, 6)  # statuses: a call of the system failed; another process or the network did


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise NCCL's errors as ours. `what`: which call of which rank, for people.

    Raises:
        PeerFailedError: If another rank or the network failed.
        DeadlineExceededError: If NCCL's own time is up.
        UnavailableError: If NCCL failed in another way.
    """
    try:
        yield
    except cuda.nccl().NcclError as error:
        head = f"{what} failed: {first_line(error)}. "
        if error.status in _REMOTE:
            raise PeerFailedError(
                f"{head}Look for the first error of another rank, and at the network; NCCL_DEBUG=WARN says more. "
                "After strategy.reset() on all ranks the calls can be made again"
            ) from error
        raise UnavailableError(
            f"{head}NCCL_DEBUG=WARN says more; MPIDIST_NCCL=0 does without NCCL, through the host"
        ) from error
    except KeyError as status:  # CuPy has no word for NCCL's newer ones: 7 in progress, 8 timeout
        kind = DeadlineExceededError if status.args == (8,) else UnavailableError
        raise kind(
            f"{what} failed with NCCL's status {status}; unset NCCL_COMM_BLOCKING, and see what NCCL_DEBUG=WARN says"
        ) from status
