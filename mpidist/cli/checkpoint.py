"""List checkpoints, and compare two of them.

    python -m mpidist checkpoint FOLDER      lists the checkpoints in a folder: step, size, time, and whether all files
                                             are there. With --read every array is read, and its checksum compared.
    python -m mpidist checkpoint diff A B    names the first leaves whose bits differ.

The exit status is 0 if all are whole, or A and B are equal; 1 if one is not whole, or A and B differ; 2 if there is
nothing to read.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from mpidist.checkpoint.folder import MANIFEST, existing, replaced_in
from mpidist.checkpoint.parts import SavedCheckpoint
from mpidist.cli.launching import RefusedError
from mpidist.errors import DataLossError
from mpidist.transport.arrays import bytes_of
from mpidist.transport.text import count_text, size_text

__all__ = ["add_arguments", "run"]


_DIFF: Final = "diff"
_HEAD: Final = ("checkpoint", "step", "size", "saved", "ranks", "whole")
_MOST_LEAVES: Final = 10
_BLOCK: Final = 1 << 20  # elements that are compared at once
_NOT_NAMED: Final = "."  # how the names of folders begin that are no checkpoints yet, or any more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "mpidist checkpoint [-h] [--read] FOLDER | diff A B"
    parser.add_argument("words", nargs="+", metavar="FOLDER | diff A B", help="a folder of checkpoints, or two of them")
    parser.add_argument("--read", action="store_true", help="read every array, and compare its checksum")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """List, or compare."""
    words = arguments.words
    is_diff = words[0] == _DIFF and len(words) == 3 and not arguments.read
    if not is_diff and (len(words) > 1 or words[0] == _DIFF):
        arguments.refuse("needed FOLDER, or diff A B; a folder of the name diff is ./diff")
    try:
        return _compare(*words[1:]) if is_diff else _list(Path(words[0]), arguments.read)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC):  # of what is printed
            raise
        raise RefusedError(error) from None


def _list(folder: Path, reads: bool) -> int:
    """Print a line for each checkpoint, whole or damaged, in the order of saves."""
    if not folder.is_dir():
        raise RefusedError(f"there is no folder {str(folder.absolute())!r}")
    inside = [place for place in sorted(folder.iterdir()) if not place.name.startswith(_NOT_NAMED)]
    places = (folder, *inside, *replaced_in(folder))
    rows = sorted(_row(place, reads) for place in places if _is_checkpoint(existing(place)))
    if not rows:
        raise RefusedError(f"there are no checkpoints in {str(folder.absolute())!r}")
    lines = [_HEAD, *(texts for _, texts in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for texts in lines:
        print("  ".join(map(str.ljust, texts, widths)).rstrip(), flush=True)
    return int(any(texts[-1] != "yes" for _, texts in rows))


def _is_checkpoint(place: Path) -> bool:
    """Whether a folder has files of a checkpoint, perhaps not all."""
    return (place / MANIFEST).is_file() or any(place.glob("*.safetensors"))


def _row(place: Path, reads: bool) -> tuple[tuple[int, float], tuple[str, ...]]:
    """Describe a checkpoint, behind what sorts the lines."""
    order, about, is_whole = (0, 0.0), ["?"] * 4, "yes"
    try:
        saved = SavedCheckpoint(place)
        when, ranks = time.strftime("%F %T", time.localtime(saved.saved_at)), str(saved.manifest["ranks"])
        about = [_step(saved), size_text(saved.nbytes), when, ranks]
        order = saved.manifest.get("order", 0), saved.saved_at  # a manager counts its saves
        saved.require_whole(reads)
    except (OSError, DataLossError) as error:
        is_whole = f"no: {error}"
    return order, (os.path.basename(os.path.abspath(place)), *about, is_whole)


def _step(saved: SavedCheckpoint) -> str:
    return str(saved.manifest.get("number", "-"))


def _compare(one: str, other: str) -> int:
    """Print the leaves that differ."""
    both = [SavedCheckpoint(Path(path)) for path in (one, other)]
    names = [dict.fromkeys(saved.keys) for saved in both]
    lines = [
        f"{name}: only in {path}"
        for path, own, others in ((one, *names), (other, *names[::-1]))
        for name in own
        if name not in others
    ]
    shared = [name for name in names[0] if name in names[1]]
    for name in shared:
        text = _difference(*((saved.form(*saved.keys[name]), saved.state(*saved.keys[name])) for saved in both))
        lines += [f"{name}: {text}"] * bool(text)
    titles = [f"{path} (step {_step(saved)})" for path, saved in zip((one, other), both, strict=True)]
    if not lines:
        print(f"{' and '.join(titles)} are equal in {count_text(len(shared), 'leaf', 'leaves')}")
        return 0
    print(f"{' and '.join(titles)} differ in {len(lines)} of {len({**names[0], **names[1]})} leaves:")
    for line in lines[:_MOST_LEAVES]:
        print(f"  {line}")
    if len(lines) > _MOST_LEAVES:
        print(f"  ... and {len(lines) - _MOST_LEAVES} more")
    return 1


def _difference(one: tuple[str, Any], other: tuple[str, Any]) -> str:
    """Describe how two states differ; "" if they are equal, bit by bit."""
    (form, state), (other_form, other_state) = one, other
    if form != other_form:
        return f"{form} and {other_form}"
    if not isinstance(state, np.ndarray):
        if json.dumps(state, sort_keys=True) == json.dumps(other_state, sort_keys=True):  # a NaN is equal to no other
            return ""
        return form if isinstance(state, dict) else f"{state!r} and {other_state!r}"
    count, most, first = 0, 0.0, -1
    flat, other_flat = state.reshape(-1), other_state.reshape(-1)
    for begin in range(0, state.size, _BLOCK):
        left, right = flat[begin : begin + _BLOCK], other_flat[begin : begin + _BLOCK]
        bits = [bytes_of(np.ascontiguousarray(block)).reshape(block.size, -1) for block in (left, right)]
        differs = (bits[0] != bits[1]).any(axis=1)
        if differs.any():
            first = begin + int(differs.argmax()) if first < 0 else first
            count += int(differs.sum())
            most = np.fmax(most, _greatest(left[differs], right[differs]))
    if not count:
        return ""
    at = [int(index) for index in np.unravel_index(first, state.shape)]
    values = f"{flat[first]!s} and {other_flat[first]!s} at {at}"
    return f"{count} of {count_text(state.size, 'element')} differ, by at most {most:.6g}; the first: {values}"


def _greatest(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the greatest difference of numbers, without those that are NaN."""
    wide: Any = complex if one.dtype.kind == "c" else float
    if one.dtype.itemsize > np.dtype(wide).itemsize or one.dtype in (np.int64, np.uint64):  # which a float cannot hold
        wide = np.clongdouble if wide is complex else np.longdouble
    with np.errstate(all="ignore"):
        return float(np.fmax.reduce(abs(one.astype(wide) - other.astype(wide)), initial=0.0))
