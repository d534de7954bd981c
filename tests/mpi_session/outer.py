"""The pytest session that the user starts: plans the launches and replays them."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpi_session.follow import INTERRUPTED, USAGE_ERROR, Ending, Follower
from mpi_session.launch import Launch, Launcher
from mpi_session.replay import Replay, ranks_text, without_ranks
from mpi_session.wire import Orders

MAX_RELAUNCHES = 3


@dataclass(frozen=True)
class Settings:
    """What the user has asked for."""

    ranks: list[int]
    grace: float
    launch_limit: float
    mpiexec: str | None
    logs: Path | None


class OuterSession:
    """Stands in for pytest's own collection and run loop."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.launcher: Launcher | None = None
        self.replays: dict[int, Replay] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        self.launcher = Launcher.find(self.settings.mpiexec)

    def pytest_report_header(self) -> str:
        assert self.launcher is not None
        sizes = ", ".join(map(str, self.settings.ranks))
        return f"mpi: {self.launcher.name} at {sizes} rank{'' if self.settings.ranks == [1] else 's'}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        session.items = []  # the ranks collect: the test modules may import MPI
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with _ended_by_sigterm():
            for size in self.settings.ranks:
                replay = self.replays[size] = _Counting(session, size, self)
                self._say(ranks_text(size))
                self._run_all(replay, size)
        self._report_deselected()
        return True

    def _run_all(self, replay: Replay, size: int) -> None:
        for attempt in range(MAX_RELAUNCHES + 1):
            if attempt:
                left = len(replay.remaining())
                self._say(f"{ranks_text(size)} again, with the {left} tests that have not run")
            ending = self._launch(replay, size)
            self._report(replay, ending)
            self._stop_where_pytest_would(replay.session)
            if ending.test is None or not ending.in_time or not replay.remaining():
                break
        else:
            ending.problem = f"{MAX_RELAUNCHES + 1} launches have ended early"
        if ending.problem:
            replay.fail_remaining(f"Not run at {ranks_text(size)}: {ending.problem}")

    def _launch(self, replay: Replay, size: int) -> Ending:
        assert self.launcher is not None
        maxfail = self.config.getoption("maxfail")
        if maxfail:
            maxfail -= replay.session.testsfailed
        with self._folder(size) as directory:
            Orders(self.settings.ranks, self.settings.grace, maxfail, replay.done).write(directory)
            given = (without_ranks(str(argument)) for argument in self.config.invocation_params.args)
            arguments = [*self._with_mpi(), *given]
            live = self.config.getoption("capture") == "no"
            launch = Launch(self.launcher, size, directory, arguments, live)
            try:
                ends_at = time.monotonic() + self.settings.launch_limit
                return Follower(launch, replay, self.settings.grace, ends_at).follow()
            finally:
                launch.stop()

    def _with_mpi(self) -> list[str]:
        return ["--with-mpi"] if self.config.pluginmanager.hasplugin("pytest_mpi") else []

    @contextmanager
    def _folder(self, size: int) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix=f"mpi-session-{size}-", dir=self.settings.logs))
        try:
            yield directory
        finally:
            if self.settings.logs is None:
                shutil.rmtree(directory)

    def _report(self, replay: Replay, ending: Ending) -> None:
        if ending.pytest_status == USAGE_ERROR:
            raise pytest.UsageError(_last_error(ending))
        if ending.pytest_status == INTERRUPTED and replay.broken:
            plural = "s" if replay.broken > 1 else ""
            raise replay.session.Interrupted(f"{replay.broken} error{plural} during collection")
        if ending.test is not None:
            replay.fail_open_test(ending.test, ending.problem, ending.failures, ending.texts)
        elif ending.problem:
            replay.fail_launch(ending.problem, ending.texts)

    def _stop_where_pytest_would(self, session: pytest.Session) -> None:
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _say(self, text: str) -> None:
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and reporter.verbosity >= 0:
            reporter.ensure_newline()
            reporter.write_sep("-", text)

    def _report_deselected(self) -> None:
        events = [replay.collected for replay in self.replays.values() if replay.collected]
        ran = {nodeid for event in events for nodeid, _ in event["tests"]}
        # A test that runs at some number of ranks is not one that the user deselected.
        never = {nodeid for event in events for nodeid in event["deselected"]} - ran
        if never:
            # No items: the ranks have these. pytest counts them only.
            self.config.hook.pytest_deselected(items=[SimpleNamespace(nodeid=nodeid) for nodeid in never])

    def count_tests(self, session: pytest.Session) -> None:
        """Tell pytest's progress how many tests there are at all numbers of ranks together."""
        known = {size: replay.collected for size, replay in self.replays.items() if replay.collected}
        first = next(iter(known.values()))
        session.testscollected = sum(
            len(known[size]["tests"]) if size in known else first["planned"][str(size)] for size in self.settings.ranks
        )


class _Counting(Replay):
    """A replay that keeps the number of all tests up to date."""

    def __init__(self, session: pytest.Session, size: int, outer: OuterSession) -> None:
        super().__init__(session, size)
        self._outer = outer

    def take_collected(self, event: Any) -> None:
        super().take_collected(event)
        self._outer.count_tests(self.session)


def _last_error(ending: Ending) -> str:
    lines = "\n".join(ending.texts.values()).splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[0] if errors else ending.problem


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("ended by SIGTERM")

    # Python's default would leave the launch behind.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
