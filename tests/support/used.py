"""What a process has: files, shared windows, objects and memory; and how many functions a call passes through."""

import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import mpidist


class Used(NamedTuple):
    """What this process has."""

    files: int  # number of open files
    mapped: int  # number of shared windows
    blocks: int  # number of Python's objects, about
    resident: int  # bytes of memory

    @classmethod
    def now(cls):
        gc.collect()
        return cls(
            len(os.listdir("/proc/self/fd")),
            Path("/proc/self/maps").read_text().count("/dev/shm/mpidist-"),
            sys.getallocatedblocks(),
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        )


def are_gone(references):
    """Whether nothing refers to objects, once the thread of started calls has left the last of these."""
    for _ in range(1000):
        gc.collect()
        if not any(reference() is not None for reference in references):
            return True
        time.sleep(0.01)
    return False


def functions_called(call):
    """Count the calls of functions of mpidist in this thread."""
    number, folder = 0, str(Path(mpidist.__file__).parent)

    def note(frame, event, _):
        nonlocal number
        number += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


def least_called(comm, call, most):
    """Count the functions of a call that all ranks make, until one was not late: those of its wait do not count."""
    least = sys.maxsize
    for turn in range(1000):
        if turn % 10 == 0 and max(comm.allgather(least)) <= most:
            break
        if turn % comm.size == comm.rank:
            time.sleep(0.002)
        least = min(least, functions_called(call))
    return least


def functions_passed(call):
    """Return the functions of mpidist that a call passes, each as a file and a name.

    Besides the comparison of the call, which is the same for all, and what a rank does while it waits.
    """
    passed, waits, folder = set(), [], mpidist.__path__[0] + "/"

    def note(frame, event, _):
        path, name = frame.f_code.co_filename.removeprefix(folder), frame.f_code.co_name
        if event == "call" and not waits:
            if path == "transport/waiting.py" or name == "_wait":
                waits.append(frame)
            elif not path.startswith(("/", "<", "transport/agreement/", "transport/failures/")):
                passed.add((path, f"{name} in line {frame.f_code.co_firstlineno}"))
        elif event == "return" and waits == [frame]:
            waits.clear()

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return passed
