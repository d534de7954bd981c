"""Signature of a call, equal on all ranks: the fields that ranks compare, and short texts for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from mpidist import nest
from mpidist.collectives.arguments.operands import Operands, Spec
from mpidist.errors import UnavailableError
from mpidist.nest.text import array_names
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import size_text

__all__ = ["Arguments", "agreed_call", "name_call", "names_of", "require_usable", "specs_text"]


class Arguments(ABC):
    """The checked arguments of one rank to a collective call. `variant`: as in `CallRecord`."""

    operands: Operands
    structure: nest.Structure
    variant = 0

    @abstractmethod
    def key(self) -> Hashable:
        """Return a key that is equal only for equal descriptions, so that each is made once. Local."""

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Return the fields that must be equal on all ranks, as name and text. Local."""


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

    Yields the arguments, and whether all ranks have the same `variant`. An exception of `open_arguments`, which checks
    this rank's arguments, becomes an error of all ranks, as `error` does.
    """
    record = Call(name, timeout_seconds=options.timeout_seconds, error=error)
    try:
        if error is None:
            arguments = open_arguments()
            fingerprint = group.agreement.fingerprint(name, arguments.key(), arguments.describe)
            details = specs_text(arguments.operands.specs)
            record = Call(
                name,
                fingerprint,
                arguments.describe,
                timeout_seconds=options.timeout_seconds,
                variant=arguments.variant,
                details=details,
            )
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


def require_usable(options: CommunicationOptions) -> None:
    """Refuse options that require NCCL where it cannot be used."""
    if options.implementation is CommunicationImplementation.NCCL:
        reason = cuda.current().support.reason
        if reason:
            raise UnavailableError(f'implementation="NCCL" cannot be had: {reason}; or use implementation="AUTO"')


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Write number, dtypes and size of arrays: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {size_text(nbytes)}"


def names_of(structures: Sequence[Any], mirrored: Sequence[Sequence[int]]) -> tuple[list[str], list[str]]:
    """Name the arrays of nests that are sent, and those at the indices `mirrored`."""
    sent_names: list[str] = []
    mirrored_names: list[str] = []
    for pair, (structure, mirrored_leaves) in enumerate(zip(structures, mirrored, strict=True)):
        prefix = f"pair {pair}, " if len(structures) > 1 else ""
        for leaf, name in enumerate(array_names(structure)):
            (mirrored_names if leaf in mirrored_leaves else sent_names).append(prefix + name)
    return sent_names, mirrored_names
