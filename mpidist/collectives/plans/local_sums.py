"""Sums of the contributions of one rank's replicas, before ranks exchange them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments.operands import Operands, Spec
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationImplementation, CommunicationOptions, Compression
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.devices import on_device, wait_for_devices
from mpidist.transport.host_memory.result_memory import SumMemory
from mpidist.transport.nccl.gpus_of_process import GpusOfProcess
from mpidist.transport.tree import Fold

__all__ = ["LocalSums", "open_all_replicas", "require_tree_order"]

_SMALL: Final = 4096  # elements: to add fewer takes less time than to begin an addition


@final
class _Run(NamedTuple):
    """Arrays that are added at once, and the number of elements of all of them."""

    indices: tuple[int, ...]
    num_elements: int


@final
class LocalSums:
    """Adds arrays of this rank's replicas, [specs], each in the dtype of its wire, in the order of a tree.

    `gpus` adds arrays of device memory, where each replica has a GPU of its own; `None` adds on the current GPU.
    """

    def __init__(
        self,
        fold: Fold,
        ufunc: np.ufunc,
        specs: Sequence[Spec],
        wires: Sequence[np.dtype[Any]],
        gpus: GpusOfProcess | None = None,
    ) -> None:
        self._fold, self._ufunc, self._gpus = fold, ufunc, gpus
        self._specs, self._wires = specs, wires
        self._runs = lru_cache(16)(self._find_runs)

    @property
    def num_rows(self) -> int:
        """Number of rows of this rank."""
        return self._fold.num_rows

    def compile(self) -> None:
        """Add a number of each kind that lies in device memory: what CuPy needs for that, CuPy compiles then. Local."""
        kinds = Counter((its.dtype, wire) for its, wire in zip(self._specs, self._wires, strict=True) if its.device)
        for (dtype, wire), number in kinds.items():
            if self._gpus is not None:
                self._gpus.compile(self._fold, self._ufunc, dtype, number, wire)
                continue
            parts = [arrays.empty((1,), dtype, device=True).astype(wire) for _ in range(self._fold.num_parts)]
            rows = [arrays.empty((1,), wire, device=True) for _ in range(self._fold.num_rows)]
            self._fold.combine(self._ufunc, parts, rows)

    def add(self, components: Sequence[Sequence[Any]], memory: SumMemory | None = None) -> list[Any]:
        """Add [replicas of this rank][arrays] to one sum for each array, of a rank that has one row.

        Sums in host memory lie in `memory`, if given. The arrays of one replica are their own sums.
        """
        if len(components) == 1:
            return list(components[0])
        runs = self._runs(tuple(range(len(self._specs))))
        shapes, wires = [(run.num_elements,) for run in runs], [self._wires[run.indices[0]] for run in runs]
        if memory is None or any(spec.device for spec in self._specs):
            are_on_gpu = [self._specs[run.indices[0]].device for run in runs]
            totals = list(map(arrays.empty, shapes, wires, are_on_gpu))
        else:
            totals = memory.take(shapes, wires)
        sums: list[Any] = []
        for run, total in zip(runs, totals, strict=True):
            self._combine(components, run, [total])
            at = 0
            for index in run.indices:
                end = at + self._specs[index].num_elements
                sums.append(total[at:end].reshape(self._specs[index].shape))
                at = end
        return sums

    def add_to_rows(self, components: Sequence[Sequence[Any]], indices: tuple[int, ...], rows: Sequence[Any]) -> None:
        """Add some arrays, all of one dtype `wire`, to flat rows of that dtype, one array after the other."""
        at = 0
        for run in self._runs(indices):
            end = at + run.num_elements
            self._combine(components, run, [row[at:end] for row in rows])
            at = end

    def _combine(self, components: Sequence[Sequence[Any]], run: _Run, rows: Sequence[Any]) -> None:
        """Add the arrays of one run to flat rows."""
        if self._gpus is not None and self._specs[run.indices[0]].device:
            parts = [[own[index] for index in run.indices] for own in components]
            self._gpus.add(self._fold, self._ufunc, parts, rows)
        else:
            self._fold.combine(self._ufunc, [self._flat(own, run) for own in components], rows)

    def _find_runs(self, indices: tuple[int, ...]) -> list[_Run]:
        """Join small arrays that follow each other, and any on GPUs that NCCL joins, so that they are added at once."""
        runs: list[_Run] = []
        kinds: list[Any] = []
        for index in indices:
            spec = self._specs[index]
            is_joined = self._gpus is not None if spec.device else spec.num_elements < _SMALL
            kind = (self._wires[index], spec.device) if is_joined else None
            if kind is not None and kinds and kinds[-1] == kind:
                runs[-1] = _Run((*runs[-1].indices, index), runs[-1].num_elements + spec.num_elements)
            else:
                runs.append(_Run((index,), spec.num_elements))
                kinds.append(kind)
        return runs

    def _flat(self, own: Sequence[Any], run: _Run) -> Any:
        """Return arrays of one replica, one after the other."""
        wire = self._wires[run.indices[0]]
        if len(run.indices) == 1:
            return arrays.on_current_device(own[run.indices[0]]).astype(wire, copy=False).reshape(-1)
        return np.concatenate([own[index] for index in run.indices], axis=None, dtype=wire, casting="unsafe")


def open_all_replicas(first: Operands, others: Sequence[Sequence[Any]], replicas: Replicas) -> list[Operands]:
    """Open the values of this rank's replicas, of which the first is opened; refuse unlike shapes and dtypes. Local.

    Arrays in device memory stay where they are, if each replica has a GPU of its own; else they come to the first GPU.
    """
    operands, replica_ids = [first], replicas.ids_here
    if not replicas.gpus_here:
        if replicas.has_several_gpus:
            wait_for_devices(replicas.devices)
        operands += map(Operands, others)
    else:
        for at, values in enumerate(others, 1):
            with on_device(replicas.devices, at):
                operands.append(Operands(values))
    for replica_id, other in zip(replica_ids, operands, strict=True):
        if other.key == first.key or other.specs == first.specs:
            continue
        index = next(at for at, pair in enumerate(zip(other.specs, first.specs, strict=True)) if pair[0] != pair[1])
        raise InvalidArgumentError(
            f"array {index} of replica {replica_id} is {other.specs[index]!r}, and that of replica {replica_ids[0]} is "
            f"{first.specs[index]!r}; all replicas must pass arrays of one shape and dtype"
        )
    return operands


def require_tree_order(options: CommunicationOptions, algorithm: str | None) -> None:
    """Refuse options that add in another order than that of replicas, or round on the way, and a named algorithm."""
    what = algorithm
    if options.compression is not Compression.NONE:
        what = f"compression={str(options.compression).lower()!r}"
    elif options.implementation is not CommunicationImplementation.AUTO:
        what = f"implementation={str(options.implementation)!r}"
    if what is not None:
        raise ValueError(
            f"{what} cannot be used where the number of replicas is chosen: replicas are added in one order on any "
            "number of ranks, and are not rounded on the way"
        )
