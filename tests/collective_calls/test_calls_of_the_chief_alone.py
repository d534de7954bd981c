"""Collective calls that rank 0 alone makes: errors name the call as the user does, and say what to do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

from mpidist import Batches, Files, Strategy, Variable, VariableSynchronization, get_replica_context
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.errors import InvalidArgumentError, PeerFailedError

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]

Calls = dict[str, Callable[[], Any]]

ONES = np.ones(8)
ALL_OR_NONE = "all ranks make the call of rank 0, or none: is it below `if strategy.is_chief:`?"
ADVICE = {
    "save": "all ranks call save, and each writes a share",
    "restore": "all ranks call restore, and each reads a share",
    "next": "Let all ranks stop at the same step.*",
}


def in_run(strategy: Strategy, name: str, *args: Any) -> Callable[[], Any]:
    return lambda: strategy.run(lambda: getattr(get_replica_context(), name)(*args))


def calls_of_strategy(strategy: Strategy) -> Calls:
    return {
        "reduce": lambda: strategy.reduce("sum", ONES),
        "reduce along axis 0": lambda: strategy.reduce("sum", ONES, axis=0),
        "gather": lambda: strategy.gather(ONES, 0),
        "broadcast": lambda: strategy.broadcast(ONES),
        "broadcast_object": lambda: strategy.broadcast_object(1),
        "broadcast_object with pickle": lambda: strategy.broadcast_object(1, pickle=True),
        "gather_object": lambda: strategy.gather_object(1),
        r"barrier\(\)": strategy.barrier,
        "symmetric_empty": lambda: strategy.symmetric_empty(3, "f4"),
        "raise_together": lambda: strategy.raise_together("reading").__exit__(None, None, None),
        r"trace\(\)": lambda: strategy.trace("unused").__enter__(),
        "broadcast_to": lambda: strategy.extended.broadcast_to(ONES, "all"),
        "all_reduce": in_run(strategy, "all_reduce", "sum", ONES),
        "start_all_reduce": lambda: in_run(strategy, "start_all_reduce", "sum", ONES)().wait(),
        "reduce_scatter": in_run(strategy, "reduce_scatter", "sum", ONES),
        "all_gather": in_run(strategy, "all_gather", ONES, 0),
        "merge_call": in_run(strategy, "merge_call", print),
    }


def calls_of_parts(strategy: Strategy, folder: Path) -> Calls:
    """Of variables, data sets and checkpoints."""
    with strategy.scope():
        weights = Variable(np.zeros(3), name="w", aggregation="sum")
        seen = Variable(0.0, synchronization=VariableSynchronization.ON_READ, aggregation="sum", name="seen")
        checkpoint = Checkpoint(w=weights)
    steps = iter(strategy.experimental_distribute_dataset([np.ones((8, 2))]))
    manager = CheckpointManager(checkpoint, folder)
    files = Files([str(folder)], lambda path: [])

    def make() -> None:
        with strategy.scope():
            Variable(0.0)

    def assign() -> None:
        strategy.run(lambda: weights.assign_add(np.ones(3)))

    return {
        "Variable": make,
        "reading of variable 'seen'": lambda: np.asarray(seen),
        "assignment to variable 'w' by add": assign,
        "next of data set 0": lambda: next(steps),
        "experimental_distribute_dataset": lambda: strategy.experimental_distribute_dataset(files),
        "distribute_datasets_from_function": lambda: strategy.distribute_datasets_from_function(
            lambda _: Batches(ONES, 2)
        ),
        "save of a checkpoint": manager.save,
        "(save) of a checkpoint": lambda: manager.save(3),
        "(save of a checkpoint)": lambda: checkpoint.write(folder / "one"),
        "restore of a checkpoint": manager.restore_or_initialize,
        "(restore) of a checkpoint": lambda: checkpoint.restore(folder / "one"),
    }


@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_call_of_the_chief_alone_is_named_with_what_to_do(comm: Intracomm, tmp_path: Path) -> None:
    others = "rank 1" if comm.size == 2 else f"ranks 1-{comm.size - 1}"
    with MultiWorker(comm=comm) as strategy:
        calls = calls_of_strategy(strategy) | calls_of_parts(strategy, Path(comm.bcast(str(tmp_path))))
        for name, call in calls.items():
            other, other_name = (
                (strategy.barrier, r"barrier\(\)") if name != r"barrier\(\)" else (calls["gather"], "gather")
            )
            last = ADVICE.get(re.split(r"\W", name.strip("("))[0], re.escape(ALL_OR_NONE))
            pattern = rf"nothing was sent\n  call: rank 0: {name}; {others}: {other_name}\n(  line: .*\n)?  {last}$"
            with raises_everywhere(comm, InvalidArgumentError, pattern):
                call() if strategy.is_chief else other()


@pytest.mark.ranks(2)
def test_save_of_the_chief_alone_at_the_end_says_what_to_do(comm: Intracomm, tmp_path: Path) -> None:
    strategy = MultiWorker(comm=comm)
    with strategy.scope():
        manager = CheckpointManager(Checkpoint(w=np.zeros(3)), tmp_path)
    if strategy.is_chief:
        with pytest.raises(PeerFailedError, match=r"while rank 0 called save of a checkpoint .*each writes a share$"):
            manager.save()
    strategy.close()


@pytest.mark.ranks(2)
def test_call_of_the_strategy_in_run_says_what_is_meant_there(comm: Intracomm) -> None:
    hints = {
        "reduce": r"call mpidist.get_replica_context\(\).all_reduce there",
        "gather": r"call mpidist.get_replica_context\(\).all_gather there",
        "broadcast": r"call it outside, or in .*merge_call",
        r"barrier\(\)": r"leave it out, as each all_reduce\(\) there waits for all ranks",
    }
    with MultiWorker(comm=comm) as strategy:
        for name, hint in hints.items():
            with raises_everywhere(comm, RuntimeError, f"^{name} .*; {hint}$"):
                strategy.run(calls_of_strategy(strategy)[name])
        with raises_everywhere(comm, TypeError, r"^Strategy\.reduce\(\) got an unexp"):
            strategy.reduce("sum", 1, into=2)  # type: ignore[call-arg]
