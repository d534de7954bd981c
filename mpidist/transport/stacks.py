"""Stacks of a node's ranks: a rank writes its stack at a signal, and other processes read it.

It writes into a file in memory, which other processes of the same user find by its name in /proc. So a rank pays
nothing for it, until somebody sends the signal. There are two:

* At the one after the number of `publish_stack`, Python itself writes the stack, between two of its instructions.
* At the number, `faulthandler` writes it in the signal's handler, and needs no lock of Python for that: also of a rank
  that sleeps or computes in C. A reader sends it only to such a rank, which has not answered the first one: of a rank
  that runs Python, the handler may read a frame that is not filled yet, and crash (Python 3.13).

Only the thread that receives the signal writes its stack. With those of all threads, which run meanwhile, the handler
of `faulthandler` would crash the rank now and then.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import itertools
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, final

from mpidist.transport.text import group_ranks, name_ranks
from mpidist.transport.tracebacks import is_printed, is_within_package

__all__ = [
    "Frame",
    "Stack",
    "StackFile",
    "caller_frames",
    "line_of_start",
    "places_text",
    "publish_stack",
    "read_stacks",
    "stack_files",
    "together",
    "walk_program",
    "withdraw_stack",
]

_NAME: Final = "mpidist-stack"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_HEAD: Final = "(most recent call first):\n"
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# How `faulthandler` writes what is not ASCII.
_ESCAPED: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u((?!d[89a-f])[0-9a-f]{4})|U(000[0-9a-f]{5}))")
_PYTHON: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED: Final = re.compile(r"/(site|dist)-packages/")

_ANSWER_SECONDS: Final = 1.0  # how long ranks may take to write their stacks
_PYTHON_SECONDS: Final = 0.02  # of computing or sleep, in which a rank that runs Python would have answered
_MOST_FRAMES: Final = 100  # as of `faulthandler`
_LOOK_SECONDS: Final = 0.0005
_UNINTERRUPTIBLE: Final = "it is in a system call that no signal interrupts, as when a file system does not answer"
_NO_FRAME: Final = "it runs no line of Python: its program begins or ends"
_SLOW: Final = "its stack did not come in time"
_MAX_PLACES: Final = 8
_MAX_BYTES: Final = 1 << 20  # a longer file is emptied before the next stack

# Of a function that makes calls for code on another stack, such as a greenlet's: finds the innermost frame there.
caller_frames: Final[dict[CodeType, Callable[[FrameType], FrameType | None]]] = {}


@final
class Frame(NamedTuple):
    """A frame of a stack: a line of a file, in a function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        here = ""
        with suppress(OSError):  # the current folder is gone
            here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.line} in {self.function}"

    @property
    def is_of_python(self) -> bool:
        """Whether it is of mpidist, or of Python's standard library."""
        is_installed = _INSTALLED.search(self.file) is not None  # below the standard library, as a rule
        is_standard = self.file.startswith(_PYTHON) and not is_installed
        return is_within_package(self.file) or self.file.startswith("<frozen ") or is_standard

    @property
    def is_of_library(self) -> bool:
        """Whether it is of another package than the program itself."""
        return self.is_of_python or _INSTALLED.search(self.file) is not None


@final
class Stack(NamedTuple):
    """Stack of a rank, as far as it is known.

    Attributes:
        problem: Why it is not known, as a clause.
        is_inside: Whether the rank is in a call of this package, whose frames are left out.
    """

    frames: tuple[Frame, ...] = ()
    problem: str = ""
    is_inside: bool = False

    @classmethod
    def of_walk(cls, found: Iterable[tuple[FrameType, int]]) -> Stack:
        """Return the stack of frames and lines, innermost first, as `traceback.walk_stack` finds them."""
        return cls._of_frames([Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in found])

    @classmethod
    def of_program(cls) -> Stack:
        """Return the innermost frame of the program itself, in a few microseconds."""
        for at, line in walk_program(sys._getframe()):
            if not _is_of_library(at.f_code.co_filename):
                return cls((Frame(at.f_code.co_filename, line, at.f_code.co_name),))
        return cls((), "in no line of the program itself")

    @classmethod
    def of_text(cls, text: str) -> Stack:
        """Read what `faulthandler` writes."""
        text = _ESCAPED.sub(lambda its: chr(int(next(filter(None, its.groups())), 16)), text)
        frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
        return cls._of_frames(frames) if frames else cls((), _NO_FRAME)

    @classmethod
    def _of_frames(cls, frames: Sequence[Frame]) -> Stack:
        """Leave out the frames that tracebacks leave out, if others remain."""
        printed = tuple(frame for frame in frames if is_printed(frame.file))
        return cls(printed or tuple(frames), is_inside=any(is_within_package(frame.file) for frame in frames[:1]))

    @property
    def place(self) -> str:
        """The innermost frame of the program itself, or else of a package that it uses; or the problem."""
        own = (frame for frame in self.frames if not frame.is_of_library)
        used = (frame for frame in self.frames if not frame.is_of_python)
        return str(next(own, None) or next(used, None) or next(iter(self.frames), self.problem))

    def __str__(self) -> str:
        return f"it is {'inside mpidist, called ' * self.is_inside}at {self.place}" if self.frames else self.problem


def walk_program(at: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Walk from a frame to its callers, as `traceback.walk_stack` does, but to those of `caller_frames` first."""
    while at is not None:
        yield at, at.f_lineno
        if at.f_code in caller_frames:
            yield from walk_program(caller_frames[at.f_code](at))
        at = at.f_back


# Of a started call on a stack of its own, which has no frame of the program: the line that started it.
line_of_start: Final[ContextVar[Stack | None]] = ContextVar("line_of_start", default=None)


@functools.cache
def _is_of_library(file: str) -> bool:
    return Frame(file, 0, "").is_of_library


@final
class StackFile(NamedTuple):
    """The file into which a rank writes its stack, and the content of the file's name.

    Attributes:
        path: The file, in the memory of the rank's process.
        number: The signal at which `faulthandler` writes; Python does at the next one, if it is the main thread.
        launcher: The launcher's process on the rank's node.
        job: The job, as its scheduler numbers it; else the launcher's process.
    """

    path: str
    number: int
    pid: int
    thread: int
    rank: int
    size: int
    launcher: int
    job: str

    @classmethod
    def of(cls, pid: int) -> StackFile | None:
        """Find the file of a process; `None` if it has none, or is another user's."""
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with suppress(OSError):  # closed meanwhile
                    words = os.readlink(entry.path).removeprefix("/memfd:").split()
                    # A forked process has the file of its parent open, too.
                    if words[:1] == [_NAME] and words[2] == str(pid):
                        number, _, thread, rank, size, launcher = map(int, words[1:7])
                        return cls(entry.path, number, pid, thread, rank, size, launcher, words[7])
        return None

    def begin(self) -> int:
        """Return where the answer to a request begins."""
        if os.stat(self.path).st_size > _MAX_BYTES:
            os.truncate(self.path, 0)
        return os.stat(self.path).st_size

    def ask(self, number: int) -> None:
        """Send a signal; an `OSError` if no process has a handler for it."""
        if not _has(_fields(f"/proc/{self.pid}/status"), number, "SigCgt"):
            raise ProcessLookupError("no handler")
        # By number: that the process has this file shows that it is the one that is meant.
        if _LIBC.tgkill(self.pid, self.thread, number):
            raise OSError(ctypes.get_errno(), "tgkill")

    def computed_seconds(self) -> float:
        """Return for how long the thread has had a processor."""
        with suppress(OSError), open(f"/proc/{self.pid}/task/{self.thread}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
        return time.monotonic()  # a kernel without statistics

    def answer(self, begin: int) -> Stack | None:
        """Read the stack; `None` as long as it is not written."""
        with open(self.path, "rb") as file:
            file.seek(begin)
            written = file.read()
        # Only then: a signal that has just left those that are pending blocks itself a moment later.
        status = _fields(f"/proc/{self.pid}/task/{self.thread}/status")
        is_busy = _has(status, self.number, "SigPnd", "ShdPnd", "SigBlk")  # it is blocked in its handler
        if is_busy or not written.endswith(b"\n") or os.stat(self.path).st_size != begin + len(written):
            return None
        text = written.decode(errors="replace")
        # The first stack is whole, if another process has asked for one as well.
        return Stack.of_text(text.partition(_HEAD)[2].partition(_HEAD)[0])


@final
class _Request:
    """A request for the stack of a process, by one signal, and then perhaps by the other."""

    def __init__(self, file: StackFile) -> None:
        self._file, self._begin = file, file.begin()
        self._since, self._computed = time.monotonic(), file.computed_seconds()
        self._is_last = file.thread != file.pid  # Python's handlers run in the main thread alone
        file.ask(file.number + (not self._is_last))

    def answer(self) -> Stack | None:
        """Read the stack; `None` as long as it is not written. Sends the second signal if Python does not answer."""
        stack = self._file.answer(self._begin)
        if stack is None and not self._is_last and self._is_in_c():
            self._is_last = True
            self._file.ask(self._file.number)
        return stack

    def _is_in_c(self) -> bool:
        """Whether the process sleeps or computes, and not in Python's instructions."""
        if self._file.computed_seconds() - self._computed > _PYTHON_SECONDS:
            return True
        return time.monotonic() - self._since > _PYTHON_SECONDS and _state(self._file) not in "R?"


@final
class _Own:
    """The file of this process, if it has one."""

    words: tuple[Any, ...] = ()
    file = -1


def publish_stack(number: int | None, rank: int, size: int, launcher: int, job: str) -> None:
    """Make the stack of this thread readable for other processes of this user at a signal, from now on. Local.

    Does nothing if the program uses the signal itself, or the machine does not have what it takes. For `job` see
    `StackFile`.
    """
    words = (_NAME, number, os.getpid(), threading.get_native_id(), rank, size, launcher, job)
    if number is None:
        return
    if _Own.words[1:2] != (number,):
        withdraw_stack()
        if any(map(_is_caught_or_ignored, (number, number + 1))) or not hasattr(_LIBC, "tgkill"):
            return
    elif not _has_own_handlers():  # the program has put a handler in the place of ours
        _close()
        return
    if words == _Own.words:
        return
    with suppress(OSError, RuntimeError, ValueError):  # such as in another interpreter than the main one
        file = os.memfd_create(" ".join(map(str, words)))
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # readers may empty it
        faulthandler.register(number, file, all_threads=False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(number + 1, _write_stack)
            signal.siginterrupt(number + 1, False)  # calls of the system continue
        _close()
        _Own.words, _Own.file = words, file


def _write_stack(_number: int, frame: FrameType | None) -> None:
    """Write the stack of this thread, as `faulthandler` does."""
    frames = itertools.islice(walk_program(frame), _MOST_FRAMES)
    text = "".join(f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}\n' for at, line in frames)
    with suppress(OSError):  # withdrawn meanwhile, or no memory
        os.write(_Own.file, (_HEAD + text).encode("ascii", "backslashreplace"))


def _has_own_handlers() -> bool:
    """Whether the program has left its handlers as `publish_stack` has set them: `faulthandler` sets none of Python."""
    its = [signal.getsignal(number) for number in (_Own.words[1], _Own.words[1] + 1)]
    return its[0] is signal.SIG_DFL and its[1] in (signal.SIG_DFL, _write_stack)


def withdraw_stack(number: int | None = None) -> None:
    """Show no stack any more; if a signal is given, only if it is one of ours, as the program needs it. Local."""
    own = _Own.words[1:3]
    if own and own[1] == os.getpid() and number in (None, own[0], own[0] + 1) and _has_own_handlers():
        faulthandler.unregister(own[0])
        if signal.getsignal(own[0] + 1) is _write_stack:
            signal.signal(own[0] + 1, signal.SIG_DFL)
        _close()


def stack_files() -> list[StackFile]:
    """List the files of all ranks of this user that run on this machine, by rank. Local."""
    found = []
    with suppress(OSError):
        found = [StackFile.of(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return sorted(filter(None, found), key=lambda file: file.rank)


def read_stacks(pids: Iterable[int], seconds: float = _ANSWER_SECONDS) -> dict[int, Stack]:
    """Read the stacks of processes of this machine; those that show none are missing. Local; takes some seconds."""
    stacks: dict[int, Stack] = {}
    asked: dict[StackFile, _Request] = {}
    for file in filter(None, map(StackFile.of, pids)):
        with suppress(OSError):
            if _state(file) in "Tt":
                stacks[file.pid] = Stack((), "it is stopped, by a signal or a debugger")
            else:
                asked[file] = _Request(file)
    until = time.monotonic() + seconds
    while asked and time.monotonic() < until:
        for file, request in list(asked.items()):
            with suppress(OSError):
                stack = request.answer()
                if stack is not None:
                    stacks[file.pid] = stack
                    del asked[file]
        time.sleep(_LOOK_SECONDS)
    for file in asked:
        with suppress(OSError):
            is_deaf = _state(file) == "D"
            stacks[file.pid] = Stack((), _UNINTERRUPTIBLE if is_deaf else _SLOW)
    return stacks


def together(stacks: Mapping[int, Stack], whole: bool = False) -> list[tuple[str, Stack]]:
    """Group ranks at the same place, or with equal `whole` stacks: their names, and the stack of one of them."""
    groups = group_ranks({rank: stack[:2] if whole else stack.place for rank, stack in stacks.items()})
    return [(name_ranks(ranks), stacks[ranks[0]]) for ranks in groups.values()]


def places_text(launcher: int, ranks: Collection[int] | None = None) -> str:
    """Say where the ranks, or some, are that a launcher has started on this machine: in brackets, or "". Local."""
    pids = {file.rank: file.pid for file in stack_files() if file.launcher == launcher}
    pids = {rank: pid for rank, pid in pids.items() if ranks is None or rank in ranks}
    stacks = read_stacks(pids.values())
    places = together({rank: stacks[pid] for rank, pid in pids.items() if pid in stacks})
    texts = [f"{name}: {stack.place}" for name, stack in places[:_MAX_PLACES]]
    texts += [f"and {len(places) - _MAX_PLACES} places more"] * (len(places) > _MAX_PLACES)
    return f" ({'; '.join(texts)})" if texts else ""


def _close() -> None:
    if _Own.file >= 0:
        os.close(_Own.file)
    _Own.words, _Own.file = (), -1


def _state(file: StackFile) -> str:
    """Return the state letter of the thread whose stack is requested: "T" of one that is stopped."""
    return _fields(f"/proc/{file.pid}/task/{file.thread}/status").get("State", "?")[0]


def _is_caught_or_ignored(number: int) -> bool:
    """Whether this process has a handler for a signal, perhaps one that is not Python's, or ignores it."""
    try:
        return _has(_fields("/proc/self/status"), number, "SigCgt", "SigIgn")
    except OSError:
        return True


def _has(fields: Mapping[str, str], number: int, *names: str) -> bool:
    """Whether one of some sets of signals has this signal."""
    return any(int(fields.get(name, "0"), 16) >> (number - 1) & 1 for name in names)


def _fields(path: str) -> dict[str, str]:
    """Read the file `status` of a process or thread."""
    with open(path, errors="replace") as file:
        return {name: text.strip() for name, _, text in (line.partition(":") for line in file)}
