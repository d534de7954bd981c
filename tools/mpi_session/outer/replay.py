"""Shows what happens in the launches as if it happened in the outer pytest session."""

from __future__ import annotations

import builtins
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from mpi_session.reports import Part, chain, failed_test, rank_parts, rank_sections, text_links
from mpi_session.selection import Team
from mpi_session.wire import Event


def without_ranks(nodeid: str) -> str:
    """Return a node id as the inner sessions know it."""
    return _SUFFIX.sub("", nodeid)


# In brackets, because pytest >= 9.2 rebuilds the node ids that it shows, up to the last bracket.
_SUFFIX = re.compile(r" \[(\d+ ranks?|no MPI)\]$")


class Replay:
    """Hands the events of all launches of one team to pytest's hooks."""

    def __init__(self, session: pytest.Session, team: Team) -> None:
        self.session = session
        self.team = team
        self.hook = session.config.hook
        self.suffix = f" [{team.name}]"
        self.collected: Event | None = None
        self.broken = 0  # modules that did not load
        self.tests: dict[str, Any] = {}  # node id: location
        self.done: list[str] = []

    def remaining(self) -> dict[str, Any]:
        """Return the tests, by node id with their locations, that have not ended yet."""
        ended = set(self.done)
        return {nodeid: where for nodeid, where in self.tests.items() if nodeid not in ended}

    def take_collected(self, event: Event) -> None:
        """Remember which tests there are; a relaunch collects only what remains."""
        if self.collected is None:
            self.collected = event
            self.tests = dict(event["tests"])

    def take_collectreport(self, event: Event) -> None:
        """Show a module that was skipped or did not load."""
        data = event["data"]
        self.broken += data["outcome"] == "failed"
        self.hook.pytest_collectreport(report=self._revive({**data, "nodeid": data["nodeid"] + self.suffix}))

    def take_start(self, event: Event) -> None:
        """Show that a test begins."""
        self.hook.pytest_runtest_logstart(**self._named(event["nodeid"], event["location"]))

    def take_report(self, event: Event) -> None:
        """Show how one phase of a test ended."""
        data = event["data"]
        self.hook.pytest_runtest_logreport(
            report=self._revive({**data, **self._named(data["nodeid"], data["location"])})
        )

    def take_end(self, event: Event) -> None:
        """Show that a test has ended."""
        self.done.append(event["nodeid"])
        self.hook.pytest_runtest_logfinish(**self._named(event["nodeid"], event["location"]))

    def take_warning(self, event: Event) -> None:
        """Show a warning."""
        category = getattr(builtins, event["category"], None)
        text = event["text"]
        if category is None:  # a class of the inner session's modules, which are not imported here
            category, text = UserWarning, f"{event['category']}: {text}"
        message = warnings.WarningMessage(text, category, event["filename"], event["lineno"])
        nodeid = event["nodeid"] and event["nodeid"] + self.suffix
        self.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "nodeid": nodeid, "when": event["when"], "location": None}
        )

    def fail_open_test(self, test: Event, reason: str, failures: Mapping[int, Any], texts: Mapping[str, str]) -> None:
        """Report the test that a launch ended in: the ranks' failures, then the texts under their titles."""
        reports = {rank: self._revive(data) for rank, data in failures.items()}
        path, line = test["location"][:2]
        parts: list[Part] = [*rank_parts(reports), ("", text_links(reason, path, (line or 0) + 1))]
        parts += [(title, text_links(text)) for title, text in texts.items()]
        self._fail(test["nodeid"], test["location"], chain(parts), rank_sections(reports))
        self.take_end(test)

    def fail_remaining(self, reason: str) -> None:
        """Report as failed what has not run."""
        for nodeid, location in self.remaining().items():
            event = {"nodeid": nodeid, "location": location}
            self.take_start(event)
            self._fail(nodeid, location, reason)
            self.take_end(event)

    def fail_launch(self, reason: str, texts: Mapping[str, str]) -> None:
        """Report what went wrong outside of any test."""
        parts: list[Part] = [("", text_links(reason))]
        parts += [(title, text_links(text)) for title, text in texts.items()]
        report = pytest.CollectReport(f"the launch{self.suffix}", "failed", chain(parts), None)
        self.hook.pytest_collectreport(report=report)

    def _fail(self, nodeid: str, location: Any, longrepr: Any, sections: Any = ()) -> None:
        report = failed_test(**self._named(nodeid, location), longrepr=longrepr, sections=sections)
        self.hook.pytest_runtest_logreport(report=report)

    def _named(self, nodeid: str, location: Any) -> dict[str, Any]:
        path, line, name = location
        return {"nodeid": nodeid + self.suffix, "location": (path, line, name + self.suffix)}

    def _revive(self, data: Any) -> Any:
        data = dict(data)
        if isinstance(data["longrepr"], list):  # a skip's place and reason, a tuple before JSON
            data["longrepr"] = tuple(data["longrepr"])
        return self.hook.pytest_report_from_serializable(config=self.session.config, data=data)
