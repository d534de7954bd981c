"""The pytest session that the user starts: plans the launches and replays them.

The launches of 1, 2, ... ranks follow each other. Beside them are *lanes*, launches of one process for the tests that
need no ranks: many of these start jobs of their own and wait for them. One thread follows all launches in turn.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpi_session.launch import Launch, Launcher
from mpi_session.outer.follow import INTERRUPTED, USAGE_ERROR, Ending, Follower
from mpi_session.outer.replay import Replay, without_ranks
from mpi_session.selection import Team, teams_of
from mpi_session.wire import Orders

MAX_RELAUNCHES = 3
_POLL = 0.02
_OVER = object()


@dataclass(frozen=True)
class Settings:
    """What the user has asked for."""

    ranks: list[int]
    grace: float
    num_lanes: int
    mpiexec: str | None
    logs: Path | None


class OuterSession:
    """Stands in for pytest's own collection and run loop."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.launcher: Launcher | None = None
        self.teams = teams_of(settings.ranks, settings.num_lanes)
        self.replays: dict[Team, Replay] = {}
        self.ranks_are_over = False

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
        sizes = [team for team in self.teams if not team.lane]
        lanes = [team for team in self.teams if team.lane]
        runs = [self._run_ranks(session, sizes), *(self._run_lane(session, team) for team in lanes)]
        with _ended_by_sigterm():
            try:
                while runs:
                    runs = [run for run in runs if next(run, _OVER) is not _OVER]
                    time.sleep(_POLL)
            finally:
                for run in runs:
                    run.close()  # ends its launch
        self._report_deselected()
        return True

    def _run_ranks(self, session: pytest.Session, teams: list[Team]) -> Iterator[None]:
        for team in teams:
            if self._planned(team) != 0:
                yield from self._run_all(session, team)
        self.ranks_are_over = True

    def _run_lane(self, session: pytest.Session, team: Team) -> Iterator[None]:
        while self._planned(team) is None and not self.ranks_are_over:
            yield
        if self._planned(team):
            yield from self._run_all(session, team)

    def _planned(self, team: Team) -> int | None:
        """Return how many tests a team has, None if no launch has collected yet."""
        for replay in self.replays.values():
            if replay.collected:
                return int(replay.collected["planned"].get(team.key, 0))
        return None

    def _run_all(self, session: pytest.Session, team: Team) -> Iterator[None]:
        replay = self.replays[team] = _Counting(session, team, self)
        self._say(team.name)
        for attempt in range(MAX_RELAUNCHES + 1):
            if attempt:
                left = len(replay.remaining())
                self._say(f"{team.name} again, with the {left} tests that have not run")
            ending = yield from self._launch(replay, team)
            self._report(replay, ending)
            self._stop_where_pytest_would(replay.session)
            if ending.test is None or not replay.remaining():
                break
        else:
            ending.problem = f"{MAX_RELAUNCHES + 1} launches have ended early"
        if ending.problem:
            replay.fail_remaining(f"Not run at {team.name}: {ending.problem}")

    def _launch(self, replay: Replay, team: Team) -> Generator[None, None, Ending]:
        assert self.launcher is not None
        maxfail = self.config.getoption("maxfail")
        if maxfail:
            maxfail -= replay.session.testsfailed
        with self._folder(team) as directory:
            settings = self.settings
            orders = Orders(settings.ranks, settings.grace, settings.num_lanes, team.lane, maxfail, replay.done)
            orders.write(directory)
            given = (without_ranks(str(argument)) for argument in self.config.invocation_params.args)
            arguments = [*self._with_mpi(), *given]
            live = self.config.getoption("capture") == "no"
            launch = Launch(self.launcher, team.size, directory, arguments, live)
            try:
                return (yield from Follower(launch, replay, settings.grace).follow())
            finally:
                launch.stop()

    def _with_mpi(self) -> list[str]:
        return ["--with-mpi"] if self.config.pluginmanager.hasplugin("pytest_mpi") else []

    @contextmanager
    def _folder(self, team: Team) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix=f"mpi-session-{team.key}-", dir=self.settings.logs))
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
        """Tell pytest's progress how many tests all teams have together."""
        known = {team: replay.collected for team, replay in self.replays.items() if replay.collected}
        session.testscollected = sum(
            len(known[team]["tests"]) if team in known else self._planned(team) or 0 for team in self.teams
        )


class _Counting(Replay):
    """A replay that keeps the number of all tests up to date."""

    def __init__(self, session: pytest.Session, team: Team, outer: OuterSession) -> None:
        super().__init__(session, team)
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
