"""Batches that lie in files, whose order follows from a seed and the number of the epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, final

import numpy as np

from mpidist.datasets.batches import require_batches, without_first
from mpidist.whole_number import whole_number

__all__ = ["Files"]


@final
class Files:
    """Batches that a function reads from files: a data set for `experimental_distribute_dataset`.

    A batch that the function yields is for one replica, so a step takes one for each replica. The `auto_shard_policy`
    of `InputOptions` says how batches are dealt out: by whole files, or in turn.

    In epoch `e` files come in the order of `numpy.random.default_rng([seed, e])`: it does not depend on the number of
    ranks.

    Args:
        names: The files, in the same order on every rank: sort what `glob` or `os.listdir` has found.
        read: Is called with a name when it is the file's turn, and returns an iterable of the file's batches; a
            generator will do. It makes no call of a strategy.
        seed: Shuffles the files anew for each epoch; `None` keeps their order.

    Attributes:
        names: As given, in a tuple.
        seed: As given.
        num_files: The number of files.

    Raises:
        TypeError: If `names` is no iterable of names, `read` no function, or `seed` no whole number.
        ValueError: If `seed` is less than 0.
    """

    def __init__(
        self, names: Iterable[str | os.PathLike[str]], read: Callable[[Any], Iterable[Any]], *, seed: int | None = None
    ) -> None:
        if isinstance(names, (str, os.PathLike)):
            raise TypeError(f"Files: names is a list of files, and this is one; write [{names!r}]")
        if not isinstance(names, Iterable):
            raise TypeError(f"Files: names is a list of files, got {names!r}")
        self.names = tuple(names)
        for name in self.names:
            if not isinstance(name, (str, os.PathLike)):
                raise TypeError(f"Files: a name is a text or a path, got {name!r}")
        if not callable(read):
            raise TypeError(f"Files: read is a function that takes a name, got {read!r}")
        self.seed = None if seed is None else whole_number("Files: seed", seed, 0)
        self.num_files = len(self.names)
        self._read = read
        self._shards: tuple[slice, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0, 0)

    def iter_from(self, epoch: int, num_samples: int) -> Iterator[Any]:
        """Iterate over the rest of an epoch. Local.

        Args:
            epoch: The number of the epoch, from 0.
            num_samples: How many samples of it to leave out, at its beginning. Their batches are read, and not used.

        Returns:
            An iterator over batches.
        """
        batches = (batch for name in self.order(epoch) for batch in self._batches_of(name))
        return without_first(batches, num_samples) if num_samples else batches

    def order(self, epoch: int) -> tuple[str | os.PathLike[str], ...]:
        """Return the files of an epoch in the order in which they are read. Local."""
        numbers = np.arange(self.num_files)
        if self.seed is not None:
            numbers = np.random.default_rng([self.seed, epoch]).permutation(self.num_files)
        for shard in self._shards:
            numbers = numbers[shard]
        return tuple(self.names[number] for number in numbers)

    def shard(self, num_shards: int, index: int) -> Files:
        """Return every `num_shards`-th file of each epoch's order, beginning with that of number `index`. Local.

        Raises:
            TypeError: If a number is no whole number.
            ValueError: If `num_shards` is less than 1, or `index` not from 0 to `num_shards - 1`.
        """
        num_shards, index = whole_number("num_shards", num_shards, 1), whole_number("index", index, 0)
        if index >= num_shards:
            raise ValueError(f"index must be less than num_shards, {num_shards}, got {index}")
        part = copy(self)
        part._shards = (*self._shards, slice(index, None, num_shards))
        return part

    def _batches_of(self, name: str | os.PathLike[str]) -> Iterable[Any]:
        batches: Iterable[Any] = self._read(name)
        try:
            require_batches(batches, may_be_used_up=True)
        except TypeError as problem:
            raise TypeError(f"Files: what read({os.fspath(name)!r}) returned: {problem}") from None
        return batches
