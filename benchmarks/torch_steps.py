"""What does a training step in PyTorch take, with gradients reduced over mpidist, and over gloo?

.venv-tensors/bin/python benchmarks torch_steps --out results                    # two minutes; needs PyTorch
.venv-tensors/bin/python benchmarks torch_steps --models resnet50,bert_base      # their parameters
.venv-tensors/bin/python benchmarks torch_steps --hosts 2 --rate 1gbit           # emulated hosts, as root
.venv-tensors/bin/python benchmarks torch_steps --beside COMMIT --out results    # mpidist of an older commit, too
.venv-tensors/bin/python benchmarks torch_steps --width 32 --rounds 2            # seconds

Steps in turn, each way with a model of its own; one way reduces nothing. After each step the gradients are reduced
once more, alone: what of that time a step does not take more than one without is hidden. What a step takes more is
also given as a share of what it takes more with DDP over gloo. Memory is that of the rank that took most.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from contest.environments import ROOT, Peer, missing
from contest.group import Group, GroupError
from hosts import Hosts, HostsError
from record import end_at_sigterm, export, parser_of, shapes_of_list
from turns import Times, add_arguments, fields_of, spread_of, tell

__all__ = ["main"]

_GLOO = "DDP over gloo"
_WARM = 2  # rounds in which memory is allocated, and which do not count

Ways = dict[str, tuple[Group, str]]  # who goes a way, and how the ranks call it


def _parse() -> argparse.Namespace:
    parser = parser_of("torch_steps", __doc__)
    parser.add_argument("--models", default="transformer", help="or resnet50, bert_base, 100x1K ...: %(default)s")
    parser.add_argument("--dtypes", default="float32", help="as float32,bfloat16: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the transformer: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sentences of a rank, for the transformer: %(default)s")
    parser.add_argument("--beside", metavar="COMMIT", help="mpidist of an older commit, too")
    parser.add_argument("--hosts", type=int, default=0, help="emulate so many hosts, as root")
    parser.add_argument("--rate", default="1gbit", help="of each host's link: %(default)s")
    add_arguments(parser, rounds=15)
    given = parser.parse_args()
    if given.hosts and (given.hosts < 2 or given.ranks % given.hosts):
        parser.error(f"{given.ranks} ranks on {given.hosts} hosts: give 2 hosts or more, and as many ranks for each")
    return given


@contextlib.contextmanager
def _groups(given: argparse.Namespace, hosts: Hosts | None) -> Iterator[dict[str, Group]]:
    """Start the ranks of this commit, and of an older one, by what is written behind their ways; and end them."""
    with contextlib.ExitStack() as ending:
        of_commit = {
            "modules": ("torch", "mpi4py", "mpidist"),
            "folder": "",
            "by_mpiexec": True,
            "program": "ranks.torch_rank",
            "arguments": (str(given.width), str(given.batch)),
        }
        peers = {"": Peer("torch_steps", "all", **of_commit)}
        if given.beside:
            source = export(ROOT, given.beside, Path(ending.enter_context(tempfile.TemporaryDirectory())))
            peers[f" @{given.beside}"] = Peer(f"torch_steps@{given.beside}", "mpidist", source=source, **of_commit)
        groups = {}
        for mark, peer in peers.items():
            python = Path(sys.executable)
            lack = missing(peer, python, given.ranks)
            if lack:
                raise SystemExit(f"{peer.name}: {lack}")
            groups[mark] = Group(peer, python, given.ranks, hosts)
            ending.callback(groups[mark].close)
            groups[mark].join()
        yield groups


def _prepare(groups: Mapping[str, Group], model: str, dtype: str) -> Ways:
    """Let all groups make their models."""
    shapes = [] if model == "transformer" else shapes_of_list(model)
    return {
        f"{way}{mark}": (group, way)
        for mark, group in groups.items()
        for way in group.ask("prepare", shapes=shapes, dtype=dtype)[0]["ways"]
    }


def _most(ways: Ways, name: str, do: str, numbers: str) -> Any:
    """Let the ranks of a way do something; return the numbers of the rank that took most of each."""
    group, way = ways[name]
    return np.max([answer[numbers] for answer in group.ask(do, way=way)], axis=0)


def _measure(ways: Ways, rounds: int) -> Times:
    """Take a step of each way in turn, in another order each round; a step takes what its slowest rank takes."""
    times: dict[str, list[Any]] = {name: [] for name in ways}
    for at in range(_WARM + rounds):
        for place in np.random.default_rng(at).permutation(len(ways)):
            name = list(ways)[place]
            times[name].append(_most(ways, name, "step", "times"))
    return {name: np.array(rows[_WARM:]) for name, rows in times.items()}


def _facts(ways: Ways, times: Times, name: str) -> dict[str, str]:
    """Return fields of the file for a way: what of its reduction is hidden, memory, and the older commit beside it."""
    pages, most = _most(ways, name, "memory", "mib")
    facts = {"new_pages_mib": f"{pages:.1f}", "most_mib": f"{most:.1f}"}
    first, alone, step = next(iter(times)), *times[name].T
    if name != first:
        facts |= fields_of("hidden", spread_of(1 - (step - times[first][:, -1]) / alone), 3)
        more = np.median(step - times[first][:, -1])
        facts["hidden"] = f"{1 - more / np.median(alone):.3f}"
        facts["of_gloo"] = f"{more / np.median((times[_GLOO] - times[first])[:, -1]):.3f}"
    old = next((one for one in times if one.startswith(f"{name} @")), None)
    if old:
        facts |= fields_of("old_by_new", spread_of(times[old][:, -1] / step), 3)
    return facts


def _line(work: str, way: str, facts: Mapping[str, str]) -> str:
    hidden = f"{float(facts['hidden']):.0%} of the reduction hidden, " if "hidden" in facts else ""
    hidden += f"{float(facts['of_gloo']):.2f} of what gloo adds to a step, " if "of_gloo" in facts else ""
    older = f"old / new {facts['old_by_new']}, " if "old_by_new" in facts else ""
    pages = f"{facts['new_pages_mib']} MiB of new pages in a step, {facts['most_mib']} MiB above those before it"
    return f"{work}, {way}: {hidden}{older}{pages}"


def main() -> int:
    """Start the ranks, measure, print and save."""
    given = _parse()
    end_at_sigterm()
    works: dict[str, Times] = {}
    facts: dict[tuple[str, str], dict[str, str]] = {}
    try:
        built = Hosts(given.hosts, given.rate, given.ranks // given.hosts) if given.hosts else contextlib.nullcontext()
        with built as hosts, _groups(given, hosts) as groups:
            for model, dtype in product(given.models.split(","), given.dtypes.split(",")):
                work = f"{model} {dtype}"
                ways = _prepare(groups, model, dtype)
                works[work] = _measure(ways, given.rounds)
                facts |= {(work, name): _facts(ways, works[work], name) for name in ways}
    except GroupError as error:
        raise SystemExit(f"a rank failed: {error}") from error
    except HostsError as error:
        raise SystemExit(f"hosts cannot be built here: {error}; {Hosts.missing()}") from error
    parts = ["torch_steps", *([f"{given.hosts}-hosts-{given.rate}"] if given.hosts else [])]
    name = "-".join([*parts, *([f"beside-{given.beside}"] if given.beside else [])])
    tell(given, name, ["reduction alone", "a step"], works, facts)
    print("", *(_line(*key, of) for key, of in facts.items()), sep="\n")
    return 0
