"""What must be the same on all ranks: errors, and bits."""

import re
from contextlib import contextmanager

from support.contributions import bits

__all__ = ["raises_everywhere", "same_everywhere"]


@contextmanager
def raises_everywhere(comm, kind, pattern=""):
    """Expect an error of this kind on every rank, with one text for all. Collective.

    Gives a list that will hold this rank's error.
    """
    error = None
    raised = []
    try:
        yield raised
    except Exception as caught:
        error = caught
        raised.append(caught)
    seen = comm.allgather(None if error is None else f"{type(error).__name__}: {error}")
    assert None not in seen, f"not raised on every rank: {seen}"
    assert len(set(seen)) == 1, f"ranks have other errors: {seen}"
    if not isinstance(error, kind):
        raise AssertionError(f"needed {kind.__name__}") from error
    assert re.search(pattern, str(error), re.DOTALL), f"{pattern!r} is not in {error}"


def same_everywhere(comm, array):
    """Whether all ranks hold an array with the same bits. Collective."""
    seen = comm.allgather(bits(array))
    return all(one == seen[0] for one in seen)
