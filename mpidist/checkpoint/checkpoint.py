"""Named nests, saved and restored as one: nests of variables, arrays, numbers and random number generators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, final

from mpidist import context_stack, nest
from mpidist.checkpoint.folder import CheckpointFolder
from mpidist.checkpoint.leaves import is_alone, strategy_of
from mpidist.checkpoint.restoring import restore
from mpidist.checkpoint.saving import Save, capture, write_together
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.transport.failures import open_groups

__all__ = ["Checkpoint"]

_ELSEWHERE: Final = {  # names of TensorFlow's Checkpoint
    "save": "write(path) writes one checkpoint, and CheckpointManager(checkpoint, folder).save() numbers them",
    "read": "restore(path) reads one",
}


@final
class Checkpoint:
    """Named nests of variables, arrays, numbers, texts, data sets and NumPy's generators, saved and restored as one.

        checkpoint = mpidist.checkpoint.Checkpoint(weights=weights, optimizer=moments, rng=rng, epoch=0)
        checkpoint.epoch += 1
        checkpoint.write("last")

    A name of the checkpoint is an attribute. Variables, arrays and generators are restored in place; numbers and texts
    are replaced in the checkpoint, so read them there: `checkpoint.epoch`. Of a distributed data set, or of its
    iterator, the position is saved: the next pass goes on there, so that no sample is skipped and none is seen twice,
    where the data come in the same order.

    What is equal on all ranks is written once: each rank writes a share. Copies of a variable must be equal, and so
    must positions in data; of arrays, generators, numbers and texts that differ each rank writes its own. A variable
    with `ON_READ` is written for each replica, and is restored to another number of replicas by its aggregation.

    Make it in the strategy's scope, or pass a variable or a data set of the strategy.

    Args:
        items: Nests by name.

    Raises:
        ValueError: If it cannot be told which strategy's checkpoint it is, or a name is one of a method or begins with
            `_`.
    """

    def __init__(self, /, **items: Any) -> None:
        taken = [name for name in items if hasattr(type(self), name) or name.startswith("_")]
        if taken:
            raise ValueError(
                f"Checkpoint() got the name {taken[0]!r}, which is one of its own, as are all that begin with '_'; "
                "choose another name"
            )
        self.__dict__["_items"] = dict(items)
        self.__dict__["_strategy"] = _strategy_of(items)

    def __getattr__(self, name: str) -> Any:
        items = self.__dict__.get("_items", {})
        if name not in items:
            if name in _ELSEWHERE:
                raise AttributeError(f"a Checkpoint has no {name}(): {_ELSEWHERE[name]}")
            raise AttributeError(f"the checkpoint has no {name!r}; it has {', '.join(items) or 'nothing'}")
        return items[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._items:
            raise AttributeError(f"the checkpoint has no {name!r}; pass it to Checkpoint({name}=...)")
        self._items[name] = value

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy whose ranks save and restore together."""
        strategy: CurrentStrategy = self.__dict__["_strategy"]
        return strategy

    def items(self) -> dict[str, Any]:
        """Return the nests by name."""
        return dict(self._items)

    def write(self, path: str | os.PathLike[str], *, on_difference: str = "raise", writers: int | str = "all") -> str:
        """Write a checkpoint. Collective; of parameter servers, local to the chief.

        All ranks call it, and each writes a share of what is equal on all ranks, of 1 MiB or more. All is written
        beside `path` and renamed at the end, so that `path` is always a whole checkpoint, the old one or the new one.

        Ranks compare checksums of what is equal by its kind: the copies of variables (but for `ON_READ`), and positions
        in data. Cost: four small rounds, the bytes read once on every rank if there are several, and the files.

        Args:
            path: A folder, equal on all ranks. A checkpoint that is there is replaced; nothing else is.
            on_difference: If copies differ, `"raise"` raises an error that names them, and `"rank 0"` saves those of
                rank 0, with a warning.
            writers: The ranks that write what is equal: `"all"`, `"per node"` for one of each node, or how many. With
                1, rank 0 alone, they need not share the folder.

        Returns:
            The path.

        Raises:
            InvalidArgumentError: If ranks save different things, if copies differ that should be equal, or if a rank
                cannot read its state. On every rank.
            OSError: If a rank cannot write, another job writes there at the same time, or the path is a file or a
                folder that holds other things. On every rank; what was in the place is there still.
        """

        def make() -> Save:
            place = Path(path).resolve()
            return Save(parts_of(self.strategy), str(Path(path)), CheckpointFolder(place.parent, place.name))

        save = capture(self.strategy, make, self._items, None, on_difference, writers)
        write_together(self.strategy, save)
        return str(path)

    def restore(self, path: str | os.PathLike[str], *, partial: bool = False) -> None:
        """Restore a checkpoint, also one of another number of ranks, replicas or servers. Collective.

        All that is needed is read and compared with its checksums before anything is changed. What is equal on all
        ranks is read once on each node: each rank reads some of the pieces that ranks have written, and sends them to
        the node's other ranks. If not all ranks see the files, rank 0 reads and sends to all. Memory: the pieces. If a
        rank is lost while they send, states may be old, new or mixed: restore again.

        Args:
            path: The folder.
            partial: Whether the checkpoint may lack names, or have others: what both have is restored, at least one
                name, and the rest is left as it is.

        Raises:
            FileNotFoundError: If there is no such folder. On every rank.
            DataLossError: If a file is missing or damaged, or of another program. On every rank.
            OSError: If the system refuses to read a file. On every rank.
            ValueError: If names, shapes or dtypes differ, or what differed by rank is restored to another number of
                ranks; or if the rest of a pass over data would be another one. On every rank.
        """
        self._items.update(restore(self.strategy, Path(path), self._items, partial))

    def __repr__(self) -> str:
        return f"<Checkpoint: {', '.join(self._items)}>"


def _strategy_of(items: dict[str, Any]) -> CurrentStrategy:
    """Find the strategy whose ranks save together."""
    leaves = [leaf for value in items.values() for leaf in nest.flatten(value)[0]]
    found = [own for leaf in leaves if (own := strategy_of(leaf)) is not None]
    spread = [own for own in found if not is_alone(own)]
    if context_stack.current() is not None:
        return spread[0] if spread else context_stack.current_strategy()
    if not found and open_groups.num_open(or_alone=True):
        raise ValueError(
            "Checkpoint() without a variable needs the strategy whose ranks save together: create it in "
            "`with strategy.scope():`"
        )
    return (spread or found or [context_stack.current_strategy()])[0]
