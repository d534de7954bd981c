"""What all ranks must agree on about a call, in fields for ranks that compare them, and in few words for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from mpidist import nest
from mpidist.collectives.arguments import Operands, Spec
from mpidist.errors import UnavailableError
from mpidist.nest import array_names
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.transport import Call, SyncGroup, cuda, size_text

__all__ = ["Arguments", "agreed_call", "names_of", "require_usable", "specs_text"]


class Arguments(ABC):
    """What one rank passes to a collective call, opened.

    Attributes:
        operands: The arrays.
        structure: The form of their nest.
        placement: As in `CallRecord`.
    """

    operands: Operands
    structure: nest.Structure
    placement = 0

    @abstractmethod
    def key(self) -> Hashable:
        """Return what is equal only for equal descriptions, to describe calls once. Local."""

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Say what must be equal on all ranks, as name and text. Local."""


_Arguments = TypeVar("_Arguments", bound=Arguments)


@contextmanager
def agreed_call(
    group: SyncGroup,
    name: str,
    options: CommunicationOptions,
    open_arguments: Callable[[], _Arguments],
    error: Exception | None,
) -> Iterator[tuple[_Arguments, bool]]:
    """Make a call with all ranks: the body does this rank's part of the call. Collective.

    Args:
        group: The ranks.
        name: What errors call it.
        options: `timeout_seconds` counts.
        open_arguments: Looks at this rank's arguments. What it raises, all ranks learn of.
        error: What is known to be wrong with this rank's arguments already.

    Returns:
        The arguments, and whether all ranks have the same `placement`.

    Raises:
        InvalidArgumentError: If the ranks differ. On every rank.
        Exception: What is wrong with this rank's arguments.
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
                placement=arguments.placement,
                details=details,
            )
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        record = Call(name, timeout_seconds=options.timeout_seconds, error=problem)
    with group.call(record) as has_same_placement:
        yield arguments, has_same_placement


def require_usable(options: CommunicationOptions) -> None:
    """Refuse options that this machine cannot follow.

    Raises:
        UnavailableError: If they insist on NCCL.
    """
    if options.implementation is CommunicationImplementation.NCCL:
        reason = cuda.current().support.reason
        if reason:
            raise UnavailableError(f'implementation="NCCL" cannot be had: {reason}; or use implementation="AUTO"')


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Say which arrays these are: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {size_text(nbytes)}"


def names_of(structures: Sequence[Any], kept: Sequence[Sequence[int]]) -> tuple[list[str], list[str]]:
    """Name the arrays of nests that travel, and those that are mirrored.

    Args:
        structures: The forms of the nests.
        kept: Which leaves of each nest are mirrored.
    """
    travelling: list[str] = []
    mirrored: list[str] = []
    for index, (structure, places) in enumerate(zip(structures, kept, strict=True)):
        pair = f"pair {index}, " if len(structures) > 1 else ""
        for place, name in enumerate(array_names(structure)):
            (mirrored if place in places else travelling).append(pair + name)
    return travelling, mirrored
