"""The tables of seeded faults: one module of `faults/` for each folder of mpidist."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fault import Fault


class Table(NamedTuple):
    """The faults of one folder of mpidist, and the tests that must notice them."""

    folder: str
    tests: Sequence[str]
    faults: Sequence[Fault]


def tables() -> dict[str, Table]:
    """Return all tables by folder; `mpidist` is that of the modules that lie in no folder."""
    names = sorted(path.stem for path in (Path(__file__).parent / "faults").glob("[!_]*.py"))
    modules = {name: import_module(f"faults.{name}") for name in names}
    folders = {name: name if name == "mpidist" else f"mpidist/{name}" for name in names}
    return {name: Table(folders[name], module.TESTS, module.FAULTS) for name, module in modules.items()}
