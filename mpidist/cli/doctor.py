"""Say what mpidist sees here, and what is wrong: MPI, launcher, cores, shared memory, GPUs, and a sum over all ranks.

Start it as you start your jobs, with as many ranks on as many nodes, or alone:

    mpirun -n 4 python -m mpidist doctor

It changes nothing, but for `--clean`, which removes what ended jobs of yours have left in /dev/shm and /tmp, and never
what a process uses. The exit status is 0, and 1 if jobs cannot run: without MPI, with a launcher that does not belong
to it, with sums that are wrong, and where ranks see something else than `--expect` says.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping

from mpidist.cli.doctor_page import as_json, print_page
from mpidist.cli.findings import Mark, compare_nodes, find
from mpidist.cli.leftovers import remove
from mpidist.cli.rank_facts import RankFacts, gpus_text
from mpidist.errors import UnavailableError
from mpidist.transport import cuda
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.transport.mpi.library import load_mpi

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--clean", action="store_true", help="remove what ended jobs of yours have left on the nodes")
    parser.add_argument(
        "--expect",
        metavar="FILE",
        help="fail where a rank sees something else than the first node of FILE, which --json has printed; remove from "
        "FILE what may differ",
    )


def run(arguments: argparse.Namespace) -> int:
    """Gather what each rank sees, and let the first rank print it. Collective."""
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
                status = int(any(one.mark is Mark.FAIL for one in found))
                if arguments.json:
                    print(as_json(topology, facts, _within_nodes(group), found), flush=True)
                else:
                    print_page(topology, facts, _within_nodes(group), found)
            except _UnreadableError as problem:
                print(f"mpidist doctor: {problem}", flush=True)
                status = 2
        return int(comm.bcast(status, 0))
    finally:
        group.close()


class _UnreadableError(Exception):
    """A file of what is expected cannot be read."""


def _expected(path: str) -> Mapping[str, str]:
    """Read what the first node of a file sees."""
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)["nodes"][0]["facts"]
        return {title: text for title, text in facts.items() if isinstance(text, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise _UnreadableError(
            f"--expect takes a file that `doctor --json` has printed; {path} cannot be used ({problem})"
        ) from None


def _within_nodes(group: SyncGroup) -> str:
    if max(group.topology.node_sizes) == 1:
        return "one rank"
    if group.levels.fused is None:
        return "messages of MPI; the warning above says what is wrong with shared memory"
    return "shared memory"
