"""Signature of a call, equal on all ranks: the fields that ranks compare, and short texts for people."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import is_
from typing import Any, Final, TypeVar, final

from mpidist import nest
from mpidist.collectives.arguments.checked_outs import CheckedOuts, KnownOuts
from mpidist.collectives.arguments.operands import Operands, Spec, swapped
from mpidist.collectives.arguments.out_arrays import is_target, write_outs
from mpidist.errors import UnavailableError
from mpidist.nest.text import array_names
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.transport import arrays, cuda
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.node_memory.symmetric import SharedArrays
from mpidist.transport.text import size_text

__all__ = [
    "Arguments",
    "Form",
    "agreed_call",
    "form_of",
    "merge",
    "move_back",
    "name_call",
    "names_of",
    "require_usable",
    "spec_fields",
    "specs_text",
]

_MAX_FORMS: Final = 1024  # a program that makes more different calls hardly repeats one


@final
class Form:
    """What follows from the form of a call's arguments on this rank: all but where the arrays lie, and their numbers.

    `fields` must be equal on all ranks, as must be which outs a node shares. `known_outs` are of `out_specs`. `axes` of
    the arrays are counted from the front. `plan` is of the call itself.
    """

    def __init__(
        self,
        call: str,
        fields: Mapping[str, str],
        specs: Sequence[Spec],
        out_specs: Sequence[Spec],
        axes: Sequence[int] = (),
        plan: Any = None,
    ) -> None:
        self.fields, self.fingerprint, self.details = fields, fingerprint_of((call, fields)), specs_text(tuple(specs))
        self.specs, self.out_specs, self.axes, self.plan = specs, out_specs, axes, plan
        self.known_outs = KnownOuts(out_specs)


def form_of(make: Callable[..., Form], group: SyncGroup, operands: Operands, *key: Hashable) -> Form:
    """Return the form `make(group, operands.specs, *key)` of a call's arguments, made once for calls alike. Local."""
    whole = make, operands.key, *key
    form: Form | None = group.forms.get(whole)
    if form is None:
        if len(group.forms) >= _MAX_FORMS:
            group.forms.clear()
        form = group.forms[whole] = make(group, operands.specs, *key)
    return form


class Arguments(ABC):
    """The checked arguments of a call on one rank; `outs` and `checked` of new results are empty."""

    form: Form
    variant = 0
    outs: Sequence[Any] = ()
    checked: CheckedOuts | None = None

    def describe(self) -> Mapping[str, str]:
        """Return the fields that must be equal on all ranks, as name and text. Local."""
        indices = () if self.checked is None else self.checked.per_node_indices
        shared = ", ".join(f"out {index}" for index in indices) or "none"
        return {**self.form.fields, "outs that are per-node arrays": shared}

    def allocate(self, group: SyncGroup, specs: Sequence[Spec], axes: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return two arrays for each result, made in the first, with an axis in front, and moved to the second."""
        made = []
        for spec, axis, out in zip(specs, axes, self.outs or [None] * len(specs), strict=True):
            if self.checked is not None and not (self.checked.are_targets or is_target(out, group.shared)):
                out = None  # `write_outs` copies the result
            if out is not None and out.swapaxes(0, axis).flags.c_contiguous:
                made.append((out.swapaxes(0, axis), out))
                continue
            front = group.result_memory.empty(swapped(spec.shape, axis), spec.dtype, spec.device)
            result = front.swapaxes(0, axis) if out is None else out
            made.append((front, result if result.flags.c_contiguous else arrays.empty(*spec)))
        return made

    def write_outs(self, results: Sequence[Any], shared: SharedArrays) -> None:
        """Copy results to outs in which they were not made. Collective over the node, if an out is per node."""
        if self.checked is None or not (self.checked.are_of_numpy and all(map(is_, self.outs, results))):
            write_outs(self.outs, results, shared)
            arrays.wait_for_writes(self.outs)


def move_back(front: Any, result: Any, axis: int) -> Any:
    """Copy a result of `Arguments.allocate` to where it belongs, unless it is there; return it. Local."""
    moved = front.swapaxes(0, axis)
    if not moved.flags.c_contiguous:
        result[...] = moved
    return result


_Arguments = TypeVar("_Arguments", bound=Arguments)


@contextmanager
def agreed_call(
    group: SyncGroup,
    name: str,
    options: CommunicationOptions,
    open_arguments: Callable[[], _Arguments],
    error: Exception | None,
) -> Iterator[tuple[_Arguments, bool]]:
    """Agree on a call with all ranks; the body then does this rank's part of the call. Collective.

    Yields the arguments, and whether all ranks have the same `variant`. All ranks raise an exception of
    `open_arguments`, which checks this rank's arguments, as they raise `error`.
    """
    record = Call(name, timeout_seconds=options.timeout_seconds, error=error)
    try:
        if error is None:
            arguments = open_arguments()
            form, checked, describe = arguments.form, arguments.checked, arguments.describe
            record = Call(name, form.fingerprint, describe, timeout_seconds=options.timeout_seconds)
            record.variant, record.details = arguments.variant, form.details
            if checked is not None:
                record.fingerprint ^= checked.per_node_digest
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        record = Call(name, timeout_seconds=options.timeout_seconds, error=name_call(problem, name))
    with group.call(record) as has_same_variant:
        yield arguments, has_same_variant


def name_call(error: Exception, call: str) -> Exception:
    """Put the name of the call whose arguments are wrong before an error's text. Returns the same error. Local."""
    text = str(error)
    if error.args == (text,) and not text.startswith(call):
        error.args = (f"{call}: {text}",)
    return error


def merge(defaults: CommunicationOptions, options: Any) -> tuple[CommunicationOptions, Exception | None]:
    """Override default options by a call's. Returns an error, which the call raises on all ranks."""
    try:
        return defaults if options is None else defaults.merge(options), None
    except Exception as problem:  # of any kind: the other ranks must learn of it
        return defaults, problem


def require_usable(options: CommunicationOptions) -> None:
    """Refuse options that require NCCL where it cannot be used."""
    if options.implementation is CommunicationImplementation.NCCL:
        reason = cuda.current().support.reason
        if reason:
            raise UnavailableError(f'implementation="NCCL" cannot be had: {reason}; or use implementation="AUTO"')


def spec_fields(structure: nest.Structure, specs: Sequence[Spec]) -> dict[str, str]:
    """Describe the arrays of a nest for `Form.fields`."""
    return {name: repr(spec) for name, spec in zip(array_names(structure), specs, strict=True)}


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Write number, dtypes and size of arrays: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {size_text(nbytes)}"


def names_of(structure: nest.Structure, mirrored: Sequence[int]) -> tuple[list[str], list[str]]:
    """Name the arrays of a nest that are sent, and those at the indices `mirrored`."""
    names: tuple[list[str], list[str]] = [], []
    for leaf, name in enumerate(array_names(structure)):
        names[leaf in mirrored].append(name)
    return names
