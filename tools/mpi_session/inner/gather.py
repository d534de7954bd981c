"""What one rank has collected, and whether all ranks have collected the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpi_session.reports import ranks_text

_SHOWN = 5


@dataclass
class Collection:
    """What the collection on one rank has found."""

    tests: list[tuple[str, list[Any]]] = field(default_factory=list)  # node id, location
    deselected: list[str] = field(default_factory=list)
    planned: dict[str, int] = field(default_factory=dict)  # number of tests by team
    reports: list[tuple[str, str, Any]] = field(default_factory=list)  # node id, outcome, serialised

    def ids(self) -> list[str]:
        """Return the node ids in their order."""
        return [nodeid for nodeid, _ in self.tests]


def compare_collections(collections: list[Collection]) -> list[tuple[int | None, dict[str, Any]]]:
    """Return what rank 0 has not seen by itself, serialised: (rank, its error) or (None, a difference)."""
    known = {nodeid for nodeid, _, _ in collections[0].reports}
    errors: list[tuple[int | None, dict[str, Any]]] = [
        (rank, data)
        for rank, collection in enumerate(collections)
        for nodeid, _, data in collection.reports
        if nodeid not in known
    ]
    lists = [collection.ids() for collection in collections]
    if not errors and any(ids != lists[0] for ids in lists):
        errors.append((None, _error("the same tests on all ranks", difference(lists))))
    return errors


def difference(lists: list[list[str]]) -> str:
    """Tell which tests which ranks have collected alone."""
    everywhere = set.intersection(*map(set, lists))
    where: dict[str, list[int]] = {}
    for rank, ids in enumerate(lists):
        for nodeid in ids:
            if nodeid not in everywhere:
                where.setdefault(nodeid, []).append(rank)
    lines = [f"  {nodeid}: only {ranks_text(ranks)}" for nodeid, ranks in list(where.items())[:_SHOWN]]
    if len(where) > _SHOWN:
        lines.append(f"  and {len(where) - _SHOWN} more")
    if not lines:
        lines = ["  the same tests in different orders"]
    return "\n".join(
        [
            "the ranks did not collect the same tests:",
            *lines,
            "Parameters must not depend on the rank, on a random number or on the order of a set.",
        ]
    )


def _error(nodeid: str, text: str) -> dict[str, Any]:
    return {
        "$report_type": "CollectReport",
        "nodeid": nodeid,
        "outcome": "failed",
        "longrepr": text,
        "sections": [],
        "result": None,
    }
