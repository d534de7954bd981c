"""The file that keeps the cost model of this machine.

The name of the file is a hash of what its numbers hold for: the placement of the ranks, the MPI library and the
processor. A missing or unusable file is no error: the default numbers are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, final

from mpidist.transport.costs.cost_model import CostModel, Placement
from mpidist.transport.mpi.library import load_mpi

__all__ = [
    "Tuned",
    "TuningKey",
    "load_tuned",
    "processor_in",
    "save_cost_model",
    "tuning_path",
]

logger = logging.getLogger("mpidist.transport")

_FORMAT: Final = 1
_warned: Final[set[str]] = set()  # each strategy reads the file


@final
@dataclass(frozen=True)
class TuningKey:
    """Key of measured numbers: number of ranks of each node, MPI's vendor, processor's model. No host."""

    placement: Placement
    mpi: str
    processor: str

    @classmethod
    def here(cls, placement: Placement) -> TuningKey:
        """Make the key of a placement on this machine. Starts MPI."""
        return cls(tuple(placement), str(load_mpi().get_vendor()[0]), _processor())

    @property
    def file_name(self) -> str:
        """The name of the file with this key's numbers."""
        return f"costs-{hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]}.json"


def tuning_path(key: TuningKey, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a key's file: in `MPIDIST_TUNE_DIR`, else `mpidist` in `XDG_CACHE_HOME` or in `~/.cache`."""
    chosen, cache = environ.get("MPIDIST_TUNE_DIR", "").strip(), environ.get("XDG_CACHE_HOME", "").strip()
    if chosen:
        return Path(os.path.expanduser(chosen)) / key.file_name
    return (Path(cache) if cache else Path.home() / ".cache") / "mpidist" / key.file_name


@final
@dataclass(frozen=True)
class Tuned:
    """The content of a file.

    Attributes:
        measured: The names of the numbers that were measured; the others are mpidist's guesses.
        date: When they were measured, in ISO 8601.
    """

    model: CostModel
    measured: tuple[str, ...]
    date: str


def load_tuned(key: TuningKey, environ: Mapping[str, str] = os.environ) -> Tuned | None:
    """Read a key's file; `None` without one, and, with one warning and its reason, for one that cannot be used. Local.

    One rank must read, and send the result to the others, so that all choose alike.
    """
    path: object = "the file of measured costs"
    try:
        path = tuning_path(key, environ)
        return _parse(path.read_text(encoding="utf-8"), key)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        text = f"{path} is not used: {error}; `python -m mpidist tune` writes it anew"
        if text not in _warned:
            logger.warning("%s", text)
            _warned.add(text)
        return None


def save_cost_model(
    key: TuningKey, model: CostModel, measured: tuple[str, ...], environ: Mapping[str, str] = os.environ
) -> Path:
    """Write the numbers of a key: in one step, so that a reader finds the old file or the new one."""
    path = tuning_path(key, environ)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = {"format": _FORMAT, "date": date, "key": asdict(key), "measured": measured, "model": asdict(model)}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}-{uuid.uuid4().hex}")
    try:
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path


def _parse(text: str, key: TuningKey) -> Tuned:
    content = json.loads(text)
    _require(isinstance(content, dict), "it is no JSON object")
    found = content.get("format")
    _require(found == _FORMAT, f"its format is {found!r}, and this version of mpidist reads {_FORMAT}")
    own_key = json.loads(json.dumps(asdict(key)))  # which has lists in place of tuples
    _require(content.get("key") == own_key, "it was measured for another machine or placement")
    values = content.get("model")
    names = {field.name for field in fields(CostModel)}
    _require(isinstance(values, dict) and set(values) == names, f"a cost model has {', '.join(sorted(names))}")
    return Tuned(CostModel(**values), tuple(map(str, content.get("measured", ()))), str(content.get("date")))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _processor() -> str:
    """Return the processor's model, or else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    return processor_in(text) or platform.processor() or platform.machine()


def processor_in(cpuinfo: str) -> str:
    """Return the processor's model that the text of /proc/cpuinfo names; "" if it names none."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    first: dict[str, str] = {}
    for name, _, value in pairs:
        first.setdefault(name.strip(), value.strip())
    if "CPU part" in first:  # of ARM, whose kernel names models by numbers alone
        return f"{platform.machine()} of implementer {first.get('CPU implementer', '')}, part {first['CPU part']}"
    return first.get("model name", "")
