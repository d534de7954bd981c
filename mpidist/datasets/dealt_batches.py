"""Batches of one data set that are dealt out to replicas: by whole files, or in turn."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

from mpidist.datasets.batches import (
    BatchSource,
    OwnBatches,
    WholeBatches,
    num_batches,
    order_fields_of,
    require_batches,
    rest_of_pipeline,
)
from mpidist.datasets.files import Files
from mpidist.datasets.input_options import AutoShardPolicy
from mpidist.datasets.parts import MISSING

__all__ = ["DealtBatches", "deal_out", "fields_of_files"]

logger = logging.getLogger(__name__)

_SAME_FILES: Final = (
    "Give all ranks the same files in the same order, and the same options: glob and os.listdir find files in any "
    "order, so sort what they have found"
)


@final
class DealtBatches(WholeBatches):
    """The batches of one data set that every rank reads whole: they are dealt out to replicas in turn.

    Args:
        batches: A re-iterable of batches, the same on every rank.
        ids_here: Which replicas this rank carries.
        num_replicas: Number of replicas.
    """

    unit = "batches"

    def __init__(self, batches: Iterable[Any], ids_here: range, num_replicas: int) -> None:
        super().__init__(order_fields_of(batches))
        self._batches, self._ids_here, self.num_at_end = batches, ids_here, num_replicas

    def num_in(self, batch: Any) -> int:
        """See `BatchSource`."""
        return self.num_at_end

    def batches_from(self, epoch: int, num_seen: int) -> Iterator[tuple[Any, ...]]:
        """See `BatchSource`. A step does not wait for what is of replicas behind."""
        own: list[Any] = []
        for number, batch in enumerate(rest_of_pipeline(self._batches, epoch, num_seen)):
            replica_id = number % self.num_at_end
            if replica_id in self._ids_here:
                own.append(batch)
            if replica_id == self._ids_here[-1]:
                yield tuple(own)
                own = []
        if own:
            yield (*own, *[MISSING] * (len(self._ids_here) - len(own)))

    def __len__(self) -> int:
        return -(-max(0, num_batches(self._batches) - self._ids_here[0]) // self.num_at_end)

    @property
    def element_spec(self) -> Any:
        """The form of the batches, if they tell it."""
        return getattr(self._batches, "element_spec", None)


def deal_out(batches: Any, policy: AutoShardPolicy, ids_here: range, num_replicas: int, is_first: bool) -> BatchSource:
    """Deal out batches to replicas as a policy says. Local.

    Args:
        batches: A re-iterable of batches for one replica each, the same on every rank.
        policy: The policy. `AUTO` is for files alone.
        ids_here: Which replicas this rank carries.
        num_replicas: Number of replicas.
        is_first: Whether this rank writes logs.

    Raises:
        TypeError: If `batches` is no re-iterable of batches.
        ValueError: If whole files are asked for, and there are fewer files than replicas, or none at all.
    """
    require_batches(batches)
    if isinstance(batches, Files) and not batches.num_files:
        raise ValueError("this data set has no files: look for a wrong folder or pattern")
    if policy is AutoShardPolicy.AUTO:
        policy = _chosen(batches, num_replicas, is_first)
    if policy is AutoShardPolicy.FILE:
        return _whole_files(batches, ids_here, num_replicas)
    if policy is AutoShardPolicy.DATA:
        return DealtBatches(batches, ids_here, num_replicas)
    return OwnBatches([batches] * len(ids_here), 1, order_fields_of(batches))


def _chosen(files: Files, num_replicas: int, is_first: bool) -> AutoShardPolicy:
    if files.num_files >= num_replicas:
        return AutoShardPolicy.FILE
    if is_first:
        logger.info(
            "AutoShardPolicy.AUTO takes DATA, as there are %d files for %d replicas: every rank reads all files, and "
            "replicas take batches in turn",
            files.num_files,
            num_replicas,
        )
    return AutoShardPolicy.DATA


def _whole_files(batches: Any, ids_here: range, num_replicas: int) -> OwnBatches:
    if not isinstance(batches, Files):
        raise ValueError(
            f"AutoShardPolicy.FILE deals out files, and this data set, a {type(batches).__name__}, does not tell which "
            "it reads; make it a mpidist.Files(names, read), or take AutoShardPolicy.DATA"
        )
    if batches.num_files < num_replicas:
        raise ValueError(
            f"AutoShardPolicy.FILE gives each of the {num_replicas} replicas whole files, and there are "
            f"{batches.num_files}; take AutoShardPolicy.DATA, or AUTO, which then does, or cut the data into more files"
        )
    pipelines = [batches.shard(num_replicas, replica_id) for replica_id in ids_here]
    return OwnBatches(pipelines, 1, {"pipelines": num_replicas, "replicas": num_replicas, **order_fields_of(batches)})


def fields_of_files(files: Files, policy: AutoShardPolicy) -> dict[str, str]:
    """Describe what must be equal on all ranks in files that are dealt out, by name."""
    names = [str(name) for name in files.names]
    shown = f": {names[0]} to {names[-1]}" if names else ""
    return {
        "files": f"{len(names)}{shown}",
        "checksum of their names": f"{zlib.crc32(chr(0).join(names).encode(errors='surrogateescape')):08x}",
        "seed": str(files.seed),
        "policy": str(policy),
        "advice": _SAME_FILES,
    }
