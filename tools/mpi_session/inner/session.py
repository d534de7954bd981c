"""The pytest session of one rank."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from mpi4py import MPI

from mpi_session import stacks
from mpi_session.inner.agree import Agreement, Outcome, Verdict, judge
from mpi_session.inner.byhand import Watch, common_folder
from mpi_session.inner.gather import Collection, compare_collections
from mpi_session.launch import DIRECTORY, HANG_SECONDS
from mpi_session.reports import chain, links, rank_parts, rank_sections
from mpi_session.selection import Team, plan, refused_skip, teams_of
from mpi_session.wire import Orders, Writer


class InnerSession:
    """Runs the tests in step with the other ranks."""

    def __init__(self, config: pytest.Config, grace: float) -> None:
        self.config = config
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.is_ours = DIRECTORY in os.environ  # else started by mpiexec or srun by hand
        self.directory = Path(os.environ[DIRECTORY]) if self.is_ours else common_folder(self.world)
        self.orders = Orders.read(self.directory) if self.is_ours else Orders([self.size], grace)
        self.wire = Writer(self.directory, self.rank)
        self.stack_file = stacks.answer_signal(self.directory, self.rank)
        self.wire.send("hello", place=stacks.here())
        self.watch = None if self.is_ours else Watch(self.world, self.directory, grace)
        self.agreement = Agreement(self.world)
        self.accepted_skips = config.getini("mpi_accepted_skips")
        self.collection = Collection()
        self.processor_seconds = processor_seconds()
        self._arrange_options()

    def _arrange_options(self) -> None:
        option = self.config.option
        if option.basetemp:
            # pytest empties this folder at its start: the ranks must not share it
            option.basetemp = f"{option.basetemp}-{self.size}-{self.rank}"
        if self.is_ours:
            option.maxfail = self.orders.maxfail
        if self.is_ours or self.rank:
            # pytest's sign for a worker: it leaves the XML file and the cache to the one who reports
            self.config.workerinput = {"workerid": f"rank{self.rank}"}  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and (self.is_ours or self.rank):
            file = (self.directory / f"rank{self.rank}.session.log").open("w", buffering=1)
            reporter._tw = create_terminal_writer(self.config, file)

    def pytest_report_header(self) -> str:
        name, version = MPI.get_vendor()
        return f"mpi: {name} {'.'.join(map(str, version))} at {self.size} ranks"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and (refusal := refused_skip(str(report.longrepr[2]), self.accepted_skips)):  # type: ignore[index]
            report.outcome, report.longrepr = "failed", refusal
        if not report.passed:
            data = self._serialised(report)
            self.collection.reports.append((report.nodeid, report.outcome, data))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.collection.deselected += [item.nodeid for item in items]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        teams = teams_of(self.orders.ranks, self.orders.num_lanes)
        own = Team(self.size, self.orders.lane)
        chosen = plan(items, list(dict.fromkeys([*teams, own])))
        self.collection.planned = {team.key: len(chosen[team.key]) for team in teams}
        kept = {item.nodeid for item in chosen[own.key]}
        left_out = [item for item in items if item.nodeid not in kept]
        if left_out:
            self.config.hook.pytest_deselected(items=left_out)
        gone = {item.nodeid for item in left_out} | set(self.orders.done)
        items[:] = [item for item in items if item.nodeid not in gone]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collection.tests = [(item.nodeid, list(item.location)) for item in session.items]
        problem = self._reach(self.collection, compare_collections, "the collection")
        if self.rank == 0:
            for rank, data in problem:
                report = self._revive(data)
                report.outcome = "failed"  # also a module that is skipped on one rank only
                if rank is not None:
                    report.longrepr = chain([(f"[rank {rank}] only", links(report))])
                self.config.hook.pytest_collectreport(report=report)
            for _, _, data in self.collection.reports:
                self.wire.send("collectreport", data=data)
            self.wire.send("collected", **vars(self.collection) | {"reports": []})
        elif problem:
            session.testsfailed += len(problem)  # no rank begins
        if problem:
            session.items.clear()
        # What the collection has made stays to the end: a garbage collection in a test need not walk over it.
        gc.collect()
        gc.freeze()
        self.processor_seconds = processor_seconds()  # the collection is no test's

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        limit = time_limit(item)
        where = {"nodeid": item.nodeid, "location": list(item.location)}
        if self.rank == 0:
            self.wire.send("start", limit=limit, **where)
        if self.watch:
            self.watch.begin(item.nodeid, limit)
        try:
            return (yield)
        finally:
            if self.watch:
                self.watch.end()
            if self.rank == 0:
                self.wire.send("end", **where)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        return True  # pytest-timeout's own timers see one rank only

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        if self.size > 1 or report.skipped:
            data = self._serialised(report) if report.failed else None
            if data:
                self.wire.send("failed", nodeid=report.nodeid, when=report.when, data=data)
            verdict = self._reach(Outcome.of(report, data), partial(judge, accepted_skips=self.accepted_skips), report)
            if verdict:
                self._obey(verdict, report)
        if self.config.option.times:
            self._add_times(report)
        return report

    def _add_times(self, report: Any) -> None:
        before, self.processor_seconds = self.processor_seconds, processor_seconds()
        used = self._reach(self.processor_seconds - before, sum, report)
        report.user_properties = [*report.user_properties, ("processor_seconds", used)]

    def _obey(self, verdict: Verdict, report: Any) -> None:
        if verdict.xfail_reason is not None:
            report.outcome, report.wasxfail = "skipped", verdict.xfail_reason
            return
        report.outcome = "failed"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        report.longrepr = verdict.text
        if verdict.failures:
            reports = {rank: self._revive(data) for rank, data in verdict.failures.items()}
            report.longrepr = chain(rank_parts(reports))
            report.sections = rank_sections(reports)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.rank == 0:
            self.wire.send("report", data=self._serialised(report))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if self.rank == 0 and self.is_ours:
            said = warning_message
            self.wire.send(
                "warning",
                text=str(said.message),
                category=said.category.__name__,
                filename=said.filename,
                lineno=said.lineno,
                when=when,
                nodeid=nodeid,
                location=location,
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.wire.send("finished", status=int(exitstatus))
        if self.is_ours and exitstatus in (0, 1, 5):
            session.exitstatus = 0  # the outer session knows; a launcher would report a crash
        elif self.watch and self.rank == 0:
            self.watch.close()

    def _serialised(self, report: Any) -> Any:
        return self.config.hook.pytest_report_to_serializable(config=self.config, report=report)

    def _revive(self, data: dict[str, Any]) -> Any:
        return self.config.hook.pytest_report_from_serializable(config=self.config, data=data)

    def _reach(self, mine: Any, decide: Any, what: Any) -> Any:
        if self.size == 1:
            return decide([mine])

        def waiting(seconds: float) -> None:
            if self.watch:
                self.watch.waiting(what, seconds)

        return self.agreement.reach(mine, decide, waiting)


def processor_seconds() -> float:
    """Return the time of this process and of those below it that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def time_limit(item: pytest.Item) -> float:
    """Return the seconds a test may take: pytest-timeout's mark, option or ini, else ours."""
    mark = item.get_closest_marker("timeout")
    if mark:
        return float(mark.kwargs.get("timeout", mark.args[0] if mark.args else HANG_SECONDS))
    given = item.config.getoption("timeout", None)
    if given is None and item.config.pluginmanager.hasplugin("timeout"):
        given = item.config.getini("timeout")
    return float(given) if given else HANG_SECONDS
