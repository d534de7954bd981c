"""Measure what reductions cost on this machine, and keep the numbers for the jobs to come.

Start it as you start your jobs, with as many ranks on as many nodes:

    mpirun -n 4 python -m mpidist tune

The numbers hold for this placement of ranks, this MPI library and this processor. They are kept in MPIDIST_TUNE_DIR,
else in mpidist below XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from mpidist.cli.measure_costs import measure_cost_model
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.costs.cost_file import TuningKey, load_tuned, save_cost_model, tuning_path
from mpidist.transport.costs.cost_model import NEVER, CostModel, Placement, name_placement
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.text import size_text, time_text

__all__ = ["add_arguments", "explain", "run"]


_MEANINGS: Final = {
    "sync_seconds": "a barrier in shared memory",
    "call_seconds": "a call of NumPy",
    "two_shot_seconds": "Python of a two-shot call",
    "copy_bytes_per_second": "copies in the cache",
    "stream_bytes_per_second": "copies out of it",
    "add_bytes_per_second": "sums",
    "mpi_seconds": "a message of MPI within a node",
    "mpi_bytes_per_second": "long messages of MPI within a node",
    "link_seconds": "a message between nodes",
    "link_bytes_per_second": "the link of a node",
    "cache_bytes": "the cache of a node's ranks",
}
_UNITS: Final = {"seconds": ("us", 1e6), "bytes_per_second": ("GB/s", 1e-9), "bytes": ("MiB", 2.0**-20)}
_MOST_SECONDS: Final = 3600
_MOST_SPREAD: Final = 2.0
_UNSURE: Final = (
    "These numbers are uncertain: slow rounds of one measurement took {:.1f} times as long as fast ones, as when other "
    "programs use the cores or the network. Measure again when they have ended, or longer, with more --seconds."
)
_POWERS: Final = range(10, 31, 2)  # of 2: the sizes in bytes that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="about how long to measure (default: 10)")
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; print the numbers in use, and the choices"
    )
    parser.add_argument(
        "--placement", type=_placement, help="with --show: ranks of each node, as in 2,2, not this job's"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers and the choices as JSON, for programs")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or show."""
    if arguments.placement is not None and not arguments.show:
        arguments.parser.error("--placement goes with --show; to measure, start as many ranks as your jobs have")
    if arguments.placement is not None:
        if load_mpi().COMM_WORLD.Get_rank() == 0:
            _show(arguments.placement, arguments.json)
        return 0
    group = SyncGroup.from_mpi(None)
    try:
        if not arguments.show:
            return _measure(group, arguments.seconds, arguments.json)
        if group.topology.rank == 0:
            _show(group.topology.node_sizes, arguments.json)
        return 0
    finally:
        group.close()


def _measure(group: SyncGroup, seconds: float, as_json: bool) -> int:
    topology = group.topology
    key = TuningKey.here(topology.node_sizes)
    if topology.rank == 0:
        _tell(f"Measuring {name_placement(topology.node_sizes)} with {key.mpi}, about {seconds:g} s.", as_json)
        if topology.local_size > (cores := os.cpu_count() or topology.local_size):
            _tell(f"Its ranks take turns on {cores} cores: what is measured here changes from time to time.", as_json)
    with group.call(Call("tune", timeout_seconds=0.0)):
        model, measured, spread = measure_cost_model(group.levels, seconds, group.agreement.restart_clock)
    if topology.rank > 0:
        return 0
    path, why = None, ""
    if group.settings.pretend_nodes is not None:
        why = "The numbers are not kept: MPIDIST_PRETEND_NODES is set, and they would be taken for those of real nodes."
    else:
        try:
            path = save_cost_model(key, model, measured)
        except (OSError, RuntimeError) as error:
            why = f"The numbers were not kept: {error}. MPIDIST_TUNE_DIR names another folder."
    _print_numbers(key, model, measured, path, as_json)
    if spread > _MOST_SPREAD:
        _tell(_UNSURE.format(spread), as_json)
    _tell(why or f"Written to {path}", as_json)
    return int(path is None and group.settings.pretend_nodes is None)


def _show(placement: Placement, as_json: bool) -> None:
    key = TuningKey.here(placement)
    path, tuned = tuning_path(key), load_tuned(key)
    model, measured = (CostModel(), ()) if tuned is None else (tuned.model, tuned.measured)
    if not as_json:
        if tuned is not None:
            source = f"Measured at {tuned.date}, from {path}"
        else:
            why = f"{path} cannot be used" if path.exists() else f"there is no {path}"
            source = f"mpidist's own numbers, not measured here: {why}."
        print(f"{source}\nFor {name_placement(placement)}, {key.mpi}, {key.processor}.")
    _print_numbers(key, model, measured, None if tuned is None else path, as_json)


def _tell(text: str, as_json: bool) -> None:
    """Print a text for people; to standard error where JSON is printed."""
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def _print_numbers(
    key: TuningKey, model: CostModel, measured: tuple[str, ...], path: Path | None, as_json: bool
) -> None:
    """Print what holds where: for people, or in seconds and bytes as JSON. `path`: the file that has it."""
    if as_json:
        choices = {str(1 << power): model.choose(1 << power, key.placement) for power in _POWERS}
        where = {"file": None if path is None else str(path), **asdict(key)}
        page = {**where, "model": asdict(model), "measured": measured, "choices": choices}
        print(json.dumps(page, indent=2), flush=True)
        return
    print()
    for name, value in asdict(model).items():
        unit, scale = _UNITS[next(unit for unit in _UNITS if name.endswith(f"_{unit}"))]
        source = "measured" if name in measured else "a guess"
        print(f"{name:<25}{value * scale:>9.4g} {unit:<5} {source:<9} {_MEANINGS[name]}")
    print(f"\n{explain(model, key.placement)}\n")


def explain(model: CostModel, placement: Placement) -> str:
    """Explain in a table which algorithm is taken from which size on, and why."""
    nodes, ranks = len(placement), sum(placement)
    if ranks == 1:
        return "1 rank: nothing to reduce."
    lines = [f"Predicted for {name_placement(placement)}:"]
    names = ("one_shot", "two_shot") if nodes == 1 else ("leader", "hierarchical", "two_shot")
    lines.append(f"{'bytes':>10}  {'taken':<12}" + "".join(f"{name:>14}" for name in names))
    for power in _POWERS:
        times = "".join(f"{time_text(model.seconds(name, 1 << power, placement)):>14}" for name in names)
        lines.append(f"{size_text(1 << power):>10}  {model.choose(1 << power, placement):<12}{times}")
    lines += _reasons(model, placement)
    return "\n".join(lines)


def _reasons(model: CostModel, placement: Placement) -> list[str]:
    chunk = model.chunk_bytes(placement)
    if len(placement) == 1:
        limit = model.one_shot_bytes(placement)
        return [
            f"one_shot to {size_text(limit)}: one barrier, but every rank reads all {placement[0]} arrays.",
            f"two_shot above, in chunks of {size_text(chunk)}: two barriers at least, and every rank adds its share.",
        ]
    least = model.least_bytes(placement)
    start = f"two_shot from {size_text(least)} on: {min(placement)} ranks a node use the link at once, while they add."
    if least == NEVER:
        start = "two_shot never: its messages cost more than they save."
    link, chunk_text = model.busy_link_seconds(chunk, len(placement)), size_text(chunk)
    return [
        start,
        "leader, hierarchical: node, nodes and node in turn; by one rank a node for little, or by all.",
        f"chunks of {chunk_text}: {time_text(link)} each on the link, latencies {time_text(model.link_seconds)}.",
        f"{model.depth(placement)} shards of a lane under way at once, so that the link does not wait.",
    ]


def _seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds <= _MOST_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, above 0 and up to {_MOST_SECONDS}")


def _placement(text: str) -> Placement:
    with suppress(ValueError):
        placement = tuple(map(int, text.split(",")))
        if min(placement) > 0:
            return placement
    raise argparse.ArgumentTypeError(f"{text!r} is no placement: give the ranks of each node, as in 2,2")
