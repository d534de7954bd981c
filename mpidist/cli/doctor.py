"""Check MPI, launcher, cores, shared memory, GPUs, and a sum over all ranks, and report problems.

Start it as you start your jobs, with as many ranks on as many nodes, or alone:

    mpirun -n 4 python -m mpidist doctor

It changes nothing, but for `--clean`, which removes what ended jobs of yours have left in /dev/shm and /tmp, and never
what a process uses. The exit status is 0, and 1 if jobs cannot run: without MPI, with a launcher that does not belong
to it, with sums that are wrong, and where ranks see something else than `--expect` lists.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

import mpidist
from mpidist.cli.findings import FAIL, OK, WARN, Finding, compare_nodes, find
from mpidist.cli.launching import RefusedError, first_of
from mpidist.cli.leftovers import remove
from mpidist.cli.rank_facts import RankFacts, gpus_text
from mpidist.errors import UnavailableError
from mpidist.transport import cuda
from mpidist.transport.costs.cost_model import name_placement
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.child_process import launcher_here
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.text import count_text, group_ranks, name_ranks
from mpidist.transport.topology import Topology

__all__ = ["add_arguments", "run"]

_STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_LOG_WIDTH: Final = 10_000  # a line of a log is not broken
_MOST_HOSTS: Final = 4  # that are named

Texts = dict[str, Any]  # what ranks of a node see, by title: a text, or texts by ranks where these differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--clean", action="store_true", help="remove leftovers of your ended jobs on the nodes")
    parser.add_argument(
        "--expect",
        metavar="FILE",
        help="fail where a rank sees something else than the first node of FILE, which --json has printed; remove from "
        "FILE what may differ",
    )


def run(arguments: argparse.Namespace) -> int:
    """Gather the facts of each rank, and print them on the first rank. Collective."""
    try:
        load_mpi()
    except UnavailableError as error:
        if not rank_from_environment(os.environ):  # every process has it, and one of them tells
            print(f"MPI:   {error}")
            print(f"GPUs:  {gpus_text(cuda.current())}")
        return 1
    group = SyncGroup.from_mpi(None)
    try:
        comm, topology = load_mpi().COMM_WORLD, group.topology
        own = RankFacts.here(group)
        if arguments.clean:
            remove(own.leftovers)
        facts = comm.allgather(own)
        found, status = find(group, facts, arguments.clean), 0
        if topology.rank == 0:
            try:
                found += compare_nodes(topology, facts, _expected(arguments.expect)) if arguments.expect else []
                status = int(any(one.mark == FAIL for one in found))
                show = _print_json if arguments.json else _print_page
                show(topology, facts, _within_nodes(group), found)
            except RefusedError as problem:
                print(f"mpidist doctor: {problem}", flush=True)
                status = 2
        return int(comm.bcast(status, 0))
    finally:
        group.close()


def _expected(path: str) -> Mapping[str, str]:
    """Read the facts of the first node of a file."""
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)["nodes"][0]["facts"]
        return {title: text for title, text in facts.items() if isinstance(text, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{path} cannot be used ({type(error).__name__}: {error})"
        raise RefusedError(f"--expect takes a file that `doctor --json` has printed; {problem}") from None


def _within_nodes(group: SyncGroup) -> str:
    if max(group.topology.node_sizes) == 1:
        return "one rank"
    if group.levels.fused is None:
        return "messages of MPI; the warning above has the error of shared memory"
    groups = len(group.topology.cache_groups)
    return f"shared memory, in {groups} groups of ranks that share a cache" if groups else "shared memory"


def _print_page(topology: Topology, facts: Sequence[RankFacts], within: str, found: Sequence[Finding]) -> None:
    """Print the facts of the ranks, and the findings. `within`: how the ranks of a node reach each other."""
    console = Console(highlight=False)
    if not console.is_terminal or not _is_launcher_in_terminal():
        console = Console(highlight=False, width=_LOG_WIDTH, force_terminal=False)
    texts = [_texts(ranks, facts) for ranks in topology.nodes]
    alike = group_ranks({node: repr(sorted(its.items())) for node, its in enumerate(texts)})
    with console.capture() as capture:
        console.print(Text(f"{name_placement(topology.node_sizes)}. Within nodes: {within}.", style="bold"))
        for nodes in alike.values():  # whose ranks all see the same; a node whose ranks differ stands alone
            console.print(Text(f"\n{_heading(topology, nodes)}", style="bold"))
            rows = [(title, line, "") for title, text in texts[nodes[0]].items() for line in _lines(text)]
            console.print(_table(rows))
        console.print(Text("\nFindings", style="bold"))
        console.print(_table([(one.mark, one.text, _STYLES[one.mark]) for one in found]))
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


def _print_json(topology: Topology, facts: Sequence[RankFacts], within: str, found: Sequence[Finding]) -> None:
    nodes = [
        {"hostname": topology.hostnames[ranks[0]], "ranks": list(ranks), "facts": _texts(ranks, facts)}
        for ranks in topology.nodes
    ]
    findings = [one._asdict() for one in found]
    page = {"version": mpidist.__version__, "within_nodes": within, "nodes": nodes, "findings": findings}
    print(json.dumps(page, indent=2), flush=True)


def _table(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text, style in rows:
        table.add_row(Text(f"  {title}", style=style), Text(text))
    return table


def _texts(ranks: Sequence[int], facts: Sequence[RankFacts]) -> Texts:
    """Return a text that is the same on all ranks of a node that have one; else the texts by rank."""
    texts: Texts = {}
    for title in dict.fromkeys(title for rank in ranks for title in facts[rank].texts):
        groups = group_ranks({rank: facts[rank].texts[title] for rank in ranks if title in facts[rank].texts})
        by_ranks = {name_ranks(its_ranks): text for text, its_ranks in groups.items()}
        texts[title] = by_ranks if len(groups) > 1 else next(iter(groups))
    return texts


def _heading(topology: Topology, nodes: Sequence[int]) -> str:
    ranks = [rank for node in nodes for rank in topology.nodes[node]]
    hosts = [topology.hostnames[topology.nodes[node][0]] for node in nodes]
    names = first_of(hosts, _MOST_HOSTS)
    if len(nodes) == 1:
        return f"Node {nodes[0]} ({names}): {name_ranks(ranks)}"
    return f"{count_text(len(nodes), 'node')} alike ({names}): {name_ranks(sorted(ranks))}"


def _lines(text: str | Mapping[str, str]) -> list[str]:
    return [text] if isinstance(text, str) else [f"{who}: {of_rank}" for who, of_rank in text.items()]
