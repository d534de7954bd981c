"""The pages: their blocks, the commands in them, and whether a command printed what its block shows.

    <!-- run: name.py -->                   a program; the commands of a page find all programs of the page
    <!-- run: name.py, needs torch -->      the same, where the module is installed; of commands `run, needs torch`
    <!-- not run: needs Slurm -->           code or commands that the tests leave alone, and why

A block of commands without a mark is run as it stands, and what it prints is compared with the block.
"""

import re
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import mpidist

__all__ = ["BLOCK", "Block", "Command", "blocks_of", "difference"]

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|not run)(?:: (?P<word>[^\n,]+))?(?:, needs (?P<needs>\w+))? -->\n+)?"
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# What can be run anywhere: programs of the page, and the library's own commands, with the variables before them.
_PROGRAM = r"(\w+\.py|-m mpidist \w+|-m mpi4py \w+\.py)[\w\s,./-]*"
_LAUNCH = r"(mpiexec -n \d+ )?python|mpidist run -n \d+( --[a-z-]+ \d+)*"
_SAFE = re.compile(rf"([A-Z][A-Z_]*=[\w,.]+ )*({_LAUNCH}) {_PROGRAM}")
_LEFT_OUT = "..."
_TRACEBACK = "Traceback (most recent call last):"
_MAX_BREAKS = 8  # of one line that was printed, in a block


class Command(NamedTuple):
    """A line of a block that begins with `$`, and the lines below it."""

    line: str  # what is typed
    shown: tuple[str, ...] = ()  # what it prints
    status: int | None = None  # its exit status, if the block shows it by `echo $?`

    @property
    def is_safe(self):
        return _SAFE.fullmatch(self.line) is not None

    @property
    def is_by_many(self):
        """Whether several processes print at once."""
        return "mpiexec" in self.line or "mpidist run" in self.line

    @property
    def shows_failure(self):
        return any(line.endswith(_TRACEBACK) for line in self.shown)

    def ends_with(self, status):
        """Whether this is the exit status of which the block speaks: with a traceback, any but 0."""
        return (status != 0) == self.shows_failure if self.status is None else status == self.status


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: Path  # the file
    number: int  # of the line where the block begins
    kind: str  # its language: `python`, `console`, `text`
    mark: str  # `run`, `not run` or nothing
    word: str  # what the mark says: a program's name, or why it is not run
    needs: str  # a module without which it is not run
    text: str  # what is between the fences

    @cached_property
    def commands(self):
        """The commands in the block, in order."""
        found = []
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            if line == "echo $?":
                found[-1] = found[-1]._replace(status=int(shown[0]))
            else:
                found.append(Command(re.sub(r"\s+#.*", "", line), tuple(shown)))
        return found


def blocks_of(page):
    """Return the blocks of a page, in order. A program without a name is called after its place."""
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        number = text.count("\n", 0, match.start("kind")) + 1
        word = match["word"] or (f"line_{number}.py" if match["kind"] == "python" else "")
        found.append(Block(page, number, match["kind"], match["mark"] or "", word, match["needs"] or "", match["text"]))
    return found


def difference(command, printed):
    """Return in what the output of a command differs from what its block shows; nothing, if in nothing.

    Hosts, numbers of processes, times and folders are those of the day, and the lines of the library itself in a
    traceback move: none of them counts. Lines of several ranks come in any order, but those that begin with the name of
    one rank. In a block a long line may be broken, and `...` stands for a part of a line, or for lines. A rank that has
    no traceback may be silent: the one that failed may have ended it before.
    """
    shown, rest = _comparable(command.shown), _comparable(printed.splitlines())
    awaited = {_rank_of(line) for line in (*rest, *(line for line in shown if line.endswith(_TRACEBACK)))}
    leaves_out = False
    while shown:
        if shown[0] == _LEFT_OUT:
            leaves_out = True
            del shown[0]
            continue
        for count in range(1, min(len(shown), _MAX_BREAKS) + 1):
            fits = _pattern(" ".join([shown[0], *map(str.strip, shown[1:count])])).fullmatch
            at = _first(rest, fits, command.is_by_many, leaves_out)
            if at is not None:
                break
        else:
            if not command.shows_failure or _rank_of(shown[0]) in {*awaited, ""}:
                return f"not printed there: {shown[0]!r}"
            del shown[0]
            while shown and shown[0].startswith(" "):
                del shown[0]
            continue
        del rest[at], shown[:count]
    return "" if leaves_out or not rest else f"not in the block: {rest[0]!r}"


def _rank_of(line):
    """Return the name of the rank with which a line begins, if it does."""
    match = re.match(r"\[rank \d+ ", line)
    return match[0] if match else ""


def _first(lines, fits, is_by_many, leaves_out):
    """Return the place of the first line that fits, if no line comes before that the same process wrote."""
    at = next((at for at, line in enumerate(lines) if fits(line)), None)
    if at is None or leaves_out:
        return at
    return None if any(_is_by_same(line, lines[at], is_by_many) for line in lines[:at]) else at


def _is_by_same(one, other, is_by_many):
    if not is_by_many:
        return True
    return _rank_of(one) == _rank_of(other) != ""


def _pattern(line):
    return re.compile(".*".join(map(re.escape, line.split(_LEFT_OUT))))


_HERE = {"laptop", "node1", socket.gethostname()}
_OF_THE_DAY = (
    (rf"\b({'|'.join(map(re.escape, sorted(_HERE)))})\b", "HOST"),
    (r"(?<![\w.])/(?:[\w.+-]+/)+", ""),
    (r"(mpidist-flight/|mpidist-flight is |costs-|Strategy |weights )[0-9a-f]+\b", r"\1HEX"),
    (r"\b0x[0-9a-f]{6,}\b", "ADDRESS"),
    (r"\bprocess \d+", "process N"),
    (r"\b\d+(\.\d+)? (us|ms|s)\b", "TIME"),
    (r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(\.\d+)?", "TIME"),
    (r"((Python|NumPy|Version:) )[\d.]+", r"\1VERSION"),
)
_OF_LAUNCHER = re.compile(r"Abort\(\d+\) on node .*")  # of MPICH
_BOX = re.compile(r"-{70,}")  # below and above what Open MPI's launcher says
_RANK = r"(?P<rank>(\[rank \d+ on [^]]*\] )?)"
_OWN_FRAME = re.compile(rf'{_RANK}  File "({re.escape(str(Path(mpidist.__file__).parent))}|mpidist)/')
_UNDERLINED = re.compile(rf"{_RANK} +[~^]+")


def _comparable(lines):
    """Return lines as they are compared: what is of the day has a name, and what tells nothing is left out."""
    found, own, is_in_box = [], None, False
    for line in filter(None, (line.strip("\0").rstrip() for line in lines)):
        if _BOX.fullmatch(line):
            is_in_box = not is_in_box
            continue
        if is_in_box and not re.match(_RANK, line)["rank"]:
            continue
        if own is not None and line.startswith(f"{own['rank']}    "):
            continue
        own = _OWN_FRAME.match(line)
        # Python 3.10 underlines nothing, and launchers say different things.
        if own is None and not _UNDERLINED.fullmatch(line) and not _OF_LAUNCHER.fullmatch(line):
            for pattern, name in _OF_THE_DAY:
                line = re.sub(pattern, name, line)
            found.append(line)
    return found
