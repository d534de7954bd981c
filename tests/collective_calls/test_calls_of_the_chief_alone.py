"""Collective calls that rank 0 alone makes: errors name the call as the user does, and say what to do."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.calls import calls_of_strategy, every_call
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.errors import InvalidArgumentError, PeerFailedError

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]

ALL_OR_NONE = "all ranks make the call of rank 0, or none: is it below `if strategy.is_chief:`?"
ADVICE = {
    "save": "all ranks call save, and each writes a share",
    "restore": "all ranks call restore, and each reads a share",
    "next": "Let all ranks stop at the same step.*",
}


@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_call_of_the_chief_alone_is_named_with_what_to_do(comm: Intracomm, tmp_path: Path) -> None:
    others = "rank 1" if comm.size == 2 else f"ranks 1-{comm.size - 1}"
    folder = Path(comm.bcast(str(tmp_path)))
    with MultiWorker(comm=comm) as strategy:
        calls = every_call(strategy, folder)
        for name, call in calls.items():
            other, other_name = (
                (strategy.barrier, r"barrier\(\)") if name != r"barrier\(\)" else (calls["gather"], "gather")
            )
            last = ADVICE.get(re.split(r"\W", name.strip("("))[0], re.escape(ALL_OR_NONE))
            pattern = rf"nothing was sent\n  call: rank 0: {name}; {others}: {other_name}\n(  line: .*\n)?  {last}$"
            with raises_everywhere(comm, InvalidArgumentError, pattern):
                call() if strategy.is_chief else other()
        assert not any(folder.iterdir())


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
