"""The hooks which a conftest imports, or ``-p mpi_session.plugin`` loads."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mpi_session import selection
from mpi_session.launch import inside_mpi
from mpi_session.outer.session import OuterSession, Settings
from mpi_session.outer.times import Times
from mpi_session.pairs import rows_of_pairs

if TYPE_CHECKING:
    from mpi4py import MPI

_INI = (
    ("mpi_ranks", "numbers of MPI ranks to run the tests at", "1,2,3,4"),
    ("mpi_grace", "seconds that a rank which failed waits for the others", "5"),
    ("mpi_lanes", "launches of one process for tests that need no ranks; 0 puts these into the first launch", "3"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpi", "MPI")
    group.addoption("--ranks", metavar="1,2,4", help="numbers of MPI ranks (ini: mpi_ranks)")
    group.addoption(
        "--lanes", metavar="N", help="launches for tests that need no ranks, beside the others (ini: mpi_lanes)"
    )
    group.addoption("--times", action="store_true", help="show how long each module took")
    group.addoption("--mpi-grace", metavar="S", help=_INI[1][1] + " (ini: mpi_grace)")
    group.addoption("--mpiexec", metavar="COMMAND", help="launcher that takes -n N, as 'srun --mpi=pmi2'")
    group.addoption("--mpi-logs", metavar="DIR", type=Path, help="keep the logs of the ranks in this folder")
    for name, text, default in _INI:
        parser.addini(name, text, default=default)
    parser.addini("mpi_accepted_skips", "how reasons begin for which CI lets tests be skipped", type="args", default=[])


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Let a test have a table of pairs, and not all products of its parameters."""
    found: Any = yield
    if not isinstance(found, list) or len(found) < 2 or found[0].get_closest_marker("whole"):
        return found
    return [found[number] for number in rows_of_pairs([item.callspec.params for item in found])]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for mark in selection.MARKS:
        config.addinivalue_line("markers", mark)
    if inside_mpi():
        from mpi_session.inner.session import InnerSession  # the outer session imports no mpi4py

        config.pluginmanager.register(InnerSession(config, _seconds(config, "mpi_grace")), "mpi_session")
    elif not config.option.collectonly:
        config.pluginmanager.register(OuterSession(config, _settings(config)), "mpi_session")
        if config.option.times:
            config.pluginmanager.register(Times(), "mpi_session_times")


def _settings(config: pytest.Config) -> Settings:
    if config.option.usepdb:
        raise pytest.UsageError("--pdb needs the terminal: run mpiexec -n 1 python -m pytest --pdb ...")
    logs = config.getoption("mpi_logs")
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    return Settings(
        ranks=_ranks(config.getoption("ranks") or config.getini("mpi_ranks")),
        grace=_seconds(config, "mpi_grace"),
        num_lanes=_lanes(config),
        mpiexec=config.getoption("mpiexec"),
        logs=logs,
    )


def _ranks(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise pytest.UsageError(f"--ranks (ini: mpi_ranks) got {text!r}: give numbers of ranks as 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def _lanes(config: pytest.Config) -> int:
    text = config.getoption("lanes") or config.getini("mpi_lanes")
    if not text.isdigit():
        raise pytest.UsageError(f"--lanes (ini: mpi_lanes) got {text!r}: give a number, 0 for none")
    return 0 if config.getoption("capture") == "no" else int(text)  # what is typed goes to one launch


def _seconds(config: pytest.Config, name: str) -> float:
    text = config.getoption(name) or config.getini(name)
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"{name} got {text!r}: give a number of seconds") from None


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """Give the test a communicator of all ranks, where no other test's messages can be."""
    from mpi4py import MPI  # the outer session imports no mpi4py

    own = MPI.COMM_WORLD.Dup()
    yield own
    own.Free()
