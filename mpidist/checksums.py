"""Checksums of values, compared over ranks: copies that should be equal, and are not, are found and named."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.errors import InvalidArgumentError
from mpidist.strategy_parts import StrategyParts
from mpidist.transport import arrays
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.arrays import bytes_of
from mpidist.transport.native.loading import native
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import name_ranks
from mpidist.values import DistributedValues
from mpidist.variables.variable import Variable

__all__ = ["CheckedVariables", "check_equal", "checksum", "difference_error", "difference_text", "differences"]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_ADVICE: Final = "was an all_reduce left out, or a variable assigned other values on each rank?"
_ALL_RUN: Final = "with MPIDIST_CHECK_VALUES all ranks call run equally often"
_NOTHING: Final = np.empty(0, np.uint8)
_BLOCK_BYTES: Final = 64  # which `native.fold_crc32` folds
_NO_INITIAL_ONES: Final = 0xFFFFFFFF
_MAX_LINES: Final = 8
_MAX_GROUPS: Final = 4  # of ranks with one checksum, in a line


def checksum(state: Any, copy: np.ndarray[Any, Any] | None = None, begin: int = 0) -> int:
    """Return the CRC-32 of a host array's bytes, or of what JSON can hold. Local; reads all bytes once.

    `copy` takes as many elements of the array, in row-major order, as it has, from number `begin` on.
    """
    if not isinstance(state, np.ndarray):
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    if not state.size:
        return 0
    into = _NOTHING if copy is None else bytes_of(copy)
    return _crc32(bytes_of(np.ascontiguousarray(state)), into, begin * state.itemsize)


def _crc32(data: np.ndarray[Any, Any], copy: np.ndarray[Any, Any], begin: int) -> int:
    """Return what `zlib.crc32` returns, of most processors four times as fast, and copy the bytes from `begin` on."""
    folded = b"" if native is None else native.fold_crc32(data, copy, begin)
    if not folded:
        copy[...] = data[begin : begin + copy.size]
        return zlib.crc32(data.data)
    return zlib.crc32(data[data.size // _BLOCK_BYTES * _BLOCK_BYTES :].data, zlib.crc32(folded, _NO_INITIAL_ONES))


def differences(
    parts: StrategyParts,
    call: str,
    fields: Mapping[str, str],
    checksums: Mapping[str, int],
    error: Exception | None = None,
) -> dict[str, list[int]]:
    """Return the checksums of all ranks, in rank order, of each name that all have if they differ. Collective.

    One small round, and two messages more if any checksum differs. `fields` must be equal on all ranks, and an `error`
    of a rank's arguments is raised on all.
    """
    variant = fingerprint_of(sorted(checksums.items())) | 1  # never 0, so that ranks always compare
    if parts.agree(call, fields, error, variant):
        return {}
    everyone = parts.group.agreement.all_gather_object(dict(checksums))
    shared = [name for name in checksums if all(name in of_rank for of_rank in everyone)]
    gathered = {name: [of_rank[name] for of_rank in everyone] for name in shared}
    return {name: of_ranks for name, of_ranks in gathered.items() if len(set(of_ranks)) > 1}


def difference_error(
    parts: StrategyParts, call: str, what: str, found: Mapping[str, Sequence[int]], advice: str
) -> InvalidArgumentError:
    """Make the error that all ranks raise because values differ: it names the values and the ranks. Local.

    `found` is what `differences` returned, by names for people.
    """
    agreement = parts.group.agreement
    error = InvalidArgumentError(f"{call} (call {agreement.sequence}): {what}\n{difference_text(found)}\n  {advice}")
    mark_shared(error, agreement.ranks)
    return error


def difference_text(found: Mapping[str, Sequence[int]]) -> str:
    """List values that differ, a line for each: which ranks have which checksum."""
    lines = [f"  {name}: {_groups_text(of_ranks)}" for name, of_ranks in list(found.items())[:_MAX_LINES]]
    return "\n".join(lines + [f"  ... and {len(found) - _MAX_LINES} more"] * (len(found) > _MAX_LINES))


def _groups_text(of_ranks: Sequence[int]) -> str:
    groups: dict[int, list[int]] = {}
    for rank, own in enumerate(of_ranks):
        groups.setdefault(own, []).append(rank)
    texts = [f"{name_ranks(ranks)}: checksum {own:08x}" for own, ranks in list(groups.items())[:_MAX_GROUPS]]
    return "; ".join(texts + ["others differ, too"] * (len(groups) > _MAX_GROUPS))


def check_equal(parts: StrategyParts, values: Any, what: str) -> None:
    """Compare all leaves of a nest over ranks: `Strategy.check_equal`. Collective."""
    fields: dict[str, str] = {"what": what}
    checksums: dict[str, int] = {}
    error: Exception | None = None
    try:
        leaves, structure = nest.flatten(values)
        for path, leaf in zip(nest.paths(structure), leaves, strict=True):
            name = path or "the value"
            form, checksums[name] = _form_and_checksum(name, leaf, parts.group)
            fields[f"form of {name}"] = form
    except Exception as problem:  # of any array library: the other ranks must learn of it
        error = problem
    found = differences(parts, "check_equal", fields, checksums, error)
    if found:
        raise difference_error(
            parts,
            "check_equal",
            f"{what}: {len(found)} of {len(checksums)} leaves differ between ranks, compared bit by bit",
            found,
            "was an all_reduce left out, or a seed? strategy.broadcast() gives all ranks the values of rank 0",
        )


def _form_and_checksum(name: str, leaf: Any, group: Any) -> tuple[str, int]:
    """Return the form of a leaf, and its checksum."""
    if isinstance(leaf, DistributedValues):
        is_one = isinstance(leaf, Variable) and leaf.is_mirrored_over(group)  # replicas of a rank share the copy
        found = {_form_and_checksum(name, component, group) for component in leaf.values[: 1 if is_one else None]}
        if len(found) > 1:
            raise ValueError(f"check_equal: {name} differs between the replicas of one rank")
        return found.pop()
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__, checksum(repr(leaf))
    try:
        array = arrays.on_host(library_of(leaf).to_native(leaf))
    except TypeError as error:
        raise TypeError(f"check_equal: {name}: {error}") from None
    if array.dtype.hasobject:
        raise TypeError(f"check_equal: {name} is an array of objects of Python: compare arrays of numbers")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return f"{native.dtype}{list(native.shape)}", checksum(arrays.without_padding(native))


@final
class CheckedVariables:
    """The mirrored variables of a strategy, compared over ranks every `MPIDIST_CHECK_VALUES` runs."""

    def __init__(self, parts: StrategyParts, period: int) -> None:
        self._parts, self._period = parts, period
        self._num_runs = 0

    def count_run(self) -> None:
        """Count a run that is over, and compare the variables if it is time. Collective then.

        Raises:
            InvalidArgumentError: If variables differ. On every rank.
        """
        self._num_runs += 1
        if self._num_runs % self._period:
            return
        call = f"comparison of variables (MPIDIST_CHECK_VALUES={self._period})"
        made = {f"{number}": reference() for number, reference in enumerate(self._parts.mirrored)}
        variables = {number: variable for number, variable in made.items() if variable is not None}
        sums: dict[str, int] = {}
        error: Exception | None = None
        try:
            group = self._parts.group
            sums = {number: _form_and_checksum(number, variable, group)[1] for number, variable in variables.items()}
        except Exception as problem:  # of a GPU, for example: the other ranks must learn of it
            error = problem
        found = differences(self._parts, call, {"run": f"{self._num_runs}", "advice": _ALL_RUN}, sums, error)
        if found:
            named = {variables[number]._what: of_ranks for number, of_ranks in found.items()}
            what = f"{len(named)} of {len(sums)} variables differ between ranks, bit by bit, after run {self._num_runs}"
            raise difference_error(self._parts, call, what, named, _ADVICE)
