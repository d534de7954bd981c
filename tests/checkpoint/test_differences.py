"""Copies that should be equal and are not: found by every save, which names them and their ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

import mpidist
from mpidist import MultiWorkerMirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

TEXT = r"save of a checkpoint \(call \d+\): copies that should be equal differ .* so nothing was saved\n"
DRIFTED = (
    TEXT
    + r"  model\['w'\] \(variable 'kernel'\): ranks? [-0-9]+: checksum \w{8}; rank \d: checksum \w{8}\n  was an all"
)


def drifted(strategy: Any, comm: Intracomm) -> Checkpoint:
    """A checkpoint with a variable that the last rank alone has changed."""
    with strategy.scope():
        kernel, bias = Variable(np.zeros((2, 3)), name="kernel"), Variable(np.ones(3), name="bias")
    if comm.rank == comm.size - 1:
        strategy.run(lambda: kernel.assign_add(np.full((2, 3), 1e-9)))
    with strategy.scope():
        return Checkpoint(model={"w": kernel, "b": bias}, own=np.array([comm.rank]), step=3)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("background", [False, True])
def test_save_of_a_copy_that_differs_raises(comm: Intracomm, folder: Path, background: bool) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        checkpoint = drifted(strategy, comm)
        manager = CheckpointManager(checkpoint, folder / "runs", background=background)
        with raises_everywhere(comm, InvalidArgumentError, DRIFTED):
            manager.save()
        with raises_everywhere(comm, InvalidArgumentError, DRIFTED):
            checkpoint.write(folder / "one")
        assert list(folder.iterdir()) == []
        checkpoint.model["w"].assign(np.ones((2, 3)))
        manager.save()
        manager.wait()


@pytest.mark.ranks(3)
def test_save_on_difference_rank_0_saves_its_copies(
    comm: Intracomm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        checkpoint = drifted(strategy, comm)
        paths = [
            checkpoint.write(folder / "one", on_difference="rank 0"),
            CheckpointManager(checkpoint, folder, on_difference="rank 0").save(),
        ]
        told = [record.getMessage() for record in caplog.records if "those of rank 0 are saved" in record.getMessage()]
        assert len(told) == (2 if comm.rank == 0 else 0)
        assert all("model['w'] (variable 'kernel')" in text for text in told)
        for path in paths:
            checkpoint.model["w"].assign(np.ones((2, 3)))
            checkpoint.restore(path)
            assert not checkpoint.model["w"].numpy().any()
            assert checkpoint.own.tolist() == [comm.rank]


@pytest.mark.ranks(3)
def test_save_of_a_position_that_differs_raises(comm: Intracomm, folder: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        dataset = strategy.experimental_distribute_dataset(mpidist.Batches(np.arange(12), 4, seed=1))
        if comm.rank == 0:
            dataset.load_state_dict({"epoch": 2, "samples": 0})
        with raises_everywhere(comm, InvalidArgumentError, TEXT + "  data: rank 0: checksum"):
            Checkpoint(data=dataset).write(folder / "one")


@pytest.mark.ranks(3)
def test_save_compares_bits(comm: Intracomm, folder: Path) -> None:
    """A NaN equals one of the same bits; what ranks may have for themselves is no difference."""
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.array([np.nan, 1.0]))
        metric = Variable(0, synchronization="ON_READ", aggregation="sum")
        strategy.run(lambda: metric.assign(comm.rank))
        rng = np.random.default_rng(comm.rank)
        Checkpoint(weights=weights, metric=metric, rng=rng, empty=Variable(np.zeros((0, 3)))).write(folder / "one")
        weights.assign(np.array([np.nan, -0.0 if comm.rank else 0.0]))
        with raises_everywhere(comm, InvalidArgumentError, TEXT + r"  weights \(variable 'variable'\): rank 0: "):
            Checkpoint(weights=weights).write(folder / "one")


@pytest.mark.ranks(3)
def test_save_with_another_on_difference_is_refused(comm: Intracomm, folder: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(a=1)
        with raises_everywhere(comm, ValueError, "on_difference must be 'raise' or 'rank 0', got 'warn'"):
            checkpoint.write(folder / "one", on_difference="warn")
        with pytest.raises(ValueError, match="on_difference must be 'raise' or 'rank 0', got None"):
            CheckpointManager(checkpoint, folder, on_difference=None)  # type: ignore[arg-type]
        with raises_everywhere(comm, InvalidArgumentError, "on_difference: rank 0: raise; "):
            checkpoint.write(folder / "one", on_difference="rank 0" if comm.rank else "raise")


@pytest.mark.ranks(3)
def test_save_of_equal_copies_sends_no_message_for_them(comm: Intracomm, folder: Path) -> None:
    """The checksums are in the round that compares the call."""
    numbers = []
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        for num_leaves in (1, 100):
            checkpoint = Checkpoint(a=[np.zeros(3) for _ in range(num_leaves)], v=Variable(1.0))
            before = parts_of(strategy).group.agreement.sequence
            checkpoint.write(folder / "one")
            numbers.append(parts_of(strategy).group.agreement.sequence - before)
    assert numbers == [4, 4]
