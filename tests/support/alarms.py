"""Signal handlers that raise, wherever a program then is."""

import signal
from contextlib import contextmanager

__all__ = ["RangError", "alarm"]


class RangError(Exception):
    """What the handler raises."""


@contextmanager
def alarm(seconds):
    """Let a signal handler raise `RangError` after so many seconds, once."""

    def ring(_, frame):
        while frame is not None:
            if frame.f_code.co_filename.endswith("weakref.py") or frame.f_code.co_name == "__del__":
                signal.setitimer(signal.ITIMER_REAL, 0.0005)  # nobody would hear of an exception in a finalizer
                return
            frame = frame.f_back
        raise RangError("the alarm")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
