"""How long the tests of each module took, and how much of the processors."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class Times:
    """Adds up what the reports tell, and shows it at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.processor: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        module = report.nodeid.partition("::")[0]
        team = report.nodeid.rpartition(" [")[2].rstrip("]")
        self.seconds[module][team] += report.duration
        self.processor[module] += dict(report.user_properties).get("processor_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        teams = sorted({team for by_team in self.seconds.values() for team in by_team})
        write = terminalreporter.write_line
        terminalreporter.section("seconds of each module")
        write(f"{'module':56}" + "".join(f"{team:>9}" for team in [*teams, "CPU"]))
        rows = sorted(self.seconds.items(), key=lambda row: -sum(row[1].values()))
        for module, by_team in rows:
            numbers = [*(by_team.get(team, 0.0) for team in teams), self.processor[module]]
            write(f"{module.removeprefix('tests/'):56}" + "".join(f"{number:9.1f}" for number in numbers))
        sums = [sum(by_team.get(team, 0.0) for by_team in self.seconds.values()) for team in teams]
        write(f"{'all':56}" + "".join(f"{number:9.1f}" for number in [*sums, sum(self.processor.values())]))
