"""What `doctor` prints: nodes that are alike once, and what was found, with marks; or the same as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from rich.console import Console
from rich.table import Table
from rich.text import Text

import mpidist
from mpidist.cli.findings import Finding, Mark
from mpidist.cli.rank_facts import RankFacts
from mpidist.transport.costs.cost_model import name_placement
from mpidist.transport.mpi.child_process import launcher_here
from mpidist.transport.text import count_text, name_ranks
from mpidist.transport.topology import Topology

__all__ = ["as_json", "print_page"]

_STYLES: Final = {Mark.OK: "green", Mark.WARN: "yellow", Mark.FAIL: "bold red"}
_LOG_WIDTH: Final = 10_000  # a line of a log is not broken
_MOST_HOSTS: Final = 4  # that are named

Texts = Mapping[str, str | Mapping[str, str]]


@final
class _Alike(NamedTuple):
    """Nodes whose ranks see the same.

    Attributes:
        nodes: Their numbers.
        texts: What is seen, by title; by rank, where the ranks of the one node differ.
    """

    nodes: list[int]
    texts: Texts


def print_page(topology: Topology, facts: Sequence[RankFacts], within: str, found: Sequence[Finding]) -> None:
    """Print what the ranks see, and what was found.

    Args:
        topology: The ranks and nodes.
        facts: What each rank sees.
        within: How the ranks of a node reach each other.
        found: The findings.
    """
    console = Console(highlight=False)
    if not console.is_terminal or not _is_launcher_in_terminal():
        console = Console(highlight=False, width=_LOG_WIDTH, force_terminal=False)
    with console.capture() as capture:
        console.print(Text(f"{name_placement(topology.node_sizes)}. Within nodes: {within}.", style="bold"))
        for alike in _alike(topology, facts):
            console.print(Text(f"\n{_heading(topology, alike.nodes)}", style="bold"))
            console.print(_table([(title, line, "") for title, text in alike.texts.items() for line in _lines(text)]))
        console.print(Text("\nFindings", style="bold"))
        console.print(_table([(one.mark.value, one.text, _STYLES[one.mark]) for one in found]))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)


def _is_launcher_in_terminal() -> bool:
    """Whether the launcher of this process, if there is one, prints to a terminal.

    Open MPI's launcher gives its ranks a terminal of its own, and passes on to a file or a pipe what they print there.
    """
    launcher = launcher_here()
    if launcher is None:
        return True
    try:
        return os.readlink(f"/proc/{launcher}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # it is another user's, or has ended
        return False


def as_json(topology: Topology, facts: Sequence[RankFacts], within: str, found: Sequence[Finding]) -> str:
    """Write the same as JSON. Arguments are those of `print_page`."""
    nodes = [
        {"hostname": topology.hostnames[ranks[0]], "ranks": list(ranks), "facts": _texts(ranks, facts)}
        for ranks in topology.nodes
    ]
    findings = [{"mark": one.mark.value, "text": one.text} for one in found]
    page = {"version": mpidist.__version__, "within_nodes": within, "nodes": nodes, "findings": findings}
    return json.dumps(page, indent=2)


def _table(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text, style in rows:
        table.add_row(Text(f"  {title}", style=style), Text(text))
    return table


def _alike(topology: Topology, facts: Sequence[RankFacts]) -> list[_Alike]:
    """Group the nodes whose ranks all see the same; a node whose ranks differ stands alone."""
    groups: list[_Alike] = []
    for node, ranks in enumerate(topology.nodes):
        texts = _texts(ranks, facts)
        same = next((group for group in groups if group.texts == texts), None)
        if same is None:
            groups.append(_Alike([node], texts))
        else:
            same.nodes.append(node)
    return groups


def _texts(ranks: Sequence[int], facts: Sequence[RankFacts]) -> dict[str, Any]:
    """Return a text that is the same on all ranks of a node that have one; else the texts by rank."""
    texts: dict[str, Any] = {}
    for title in dict.fromkeys(title for rank in ranks for title in facts[rank].texts):
        of_rank = {rank: facts[rank].texts[title] for rank in ranks if title in facts[rank].texts}
        different = list(dict.fromkeys(of_rank.values()))
        by_ranks = {name_ranks(rank for rank in of_rank if of_rank[rank] == text): text for text in different}
        texts[title] = different[0] if len(different) == 1 else by_ranks
    return texts


def _heading(topology: Topology, nodes: Sequence[int]) -> str:
    ranks = [rank for node in nodes for rank in topology.nodes[node]]
    hosts = [topology.hostnames[topology.nodes[node][0]] for node in nodes]
    names = ", ".join(hosts[:_MOST_HOSTS]) + (
        f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    )
    if len(nodes) == 1:
        return f"Node {nodes[0]} ({names}): {name_ranks(ranks)}"
    return f"{count_text(len(nodes), 'node')} alike ({names}): {name_ranks(sorted(ranks))}"


def _lines(text: str | Mapping[str, str]) -> list[str]:
    return [text] if isinstance(text, str) else [f"{who}: {of_rank}" for who, of_rank in text.items()]
