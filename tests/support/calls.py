"""Every collective call of a strategy, by its name in errors: for what holds of all of them."""

import numpy as np

from mpidist import Batches, Files, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager
from support.replicas import inside

__all__ = ["calls_of_parts", "calls_of_strategy", "every_call"]


ONES = np.ones(8)


def calls_of_strategy(strategy):
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
        "(reduce)": lambda: strategy.extended.reduce_to("sum", 1.0, 0),
        "batch_reduce": lambda: strategy.extended.batch_reduce_to("sum", [(1.0, 0)]),
        "broadcast_to": lambda: strategy.extended.broadcast_to(ONES, "all"),
        "all_reduce": lambda: inside(strategy, "all_reduce", "sum", ONES),
        "start_all_reduce": lambda: inside(strategy, "start_all_reduce", "sum", ONES).wait(),
        "reduce_scatter": lambda: inside(strategy, "reduce_scatter", "sum", ONES),
        "all_gather": lambda: inside(strategy, "all_gather", ONES, 0),
        "merge_call": lambda: inside(strategy, "merge_call", str),
    }


def calls_of_parts(strategy, folder):
    """Of variables, data sets and checkpoints. Collective."""
    with strategy.scope():
        weights = Variable(np.zeros(3), name="w", aggregation="sum")
        seen = Variable(0.0, synchronization="on_read", aggregation="sum", name="seen")
        checkpoint = Checkpoint(w=weights)
    steps = iter(strategy.experimental_distribute_dataset([np.ones((8, 2))] * 2))
    manager = CheckpointManager(checkpoint, folder)
    files = Files([str(folder)], lambda path: [])

    def make():
        with strategy.scope():
            Variable(0.0)

    return {
        "Variable": make,
        "reading of variable 'seen'": lambda: np.asarray(seen),
        "assignment to variable 'w' by add": lambda: strategy.run(lambda: weights.assign_add(np.ones(3))),
        r"next of data set \d+": lambda: next(steps),
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


def every_call(strategy, folder):
    return calls_of_strategy(strategy) | calls_of_parts(strategy, folder)
