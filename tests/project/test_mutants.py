"""The tables of seeded faults fit the sources: what `make mutants` replaces is there once, and makes valid Python."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).resolve().parents[2]


def test_seeded_faults_fit_the_sources(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/mutants"))
    from tables import tables

    wrong = []
    for table in tables().values():
        assert table.faults
        wrong += [f"{table.folder}: no {tests}" for tests in table.tests if not (ROOT / tests).exists()]
        for number, fault in enumerate(table.faults, start=1):
            text = (ROOT / table.folder / fault.file).read_text()
            if text.count(fault.old) != 1 or fault.old == fault.new:
                wrong.append(f"{table.folder} {number}: {text.count(fault.old)} times in {fault.file}: {fault.old!r}")
            elif fault.file.endswith(".py"):
                ast.parse(text.replace(fault.old, fault.new))
    assert wrong == [], "write these anew, so that they are faults of today's code"
