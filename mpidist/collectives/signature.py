"""What a caller of a reduction asks for."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from mpidist.errors import UnavailableError
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.transport import cuda

__all__ = ["Request", "require_usable"]


@final
class Request(NamedTuple):
    """What a caller asks for: everything about a call but the values. Equal on all ranks.

    Attributes:
        call: The name of the call, for errors and logs.
        op: The reduction.
        structure: The form of the nest, from `nest.flatten`.
        destinations: The ranks of each value's result; `None` for all ranks everywhere.
        options: How it shall travel.
        mirrored: Which leaves of the nest stay where they are; with destinations, of each nest.
    """

    call: str
    op: ReduceOp
    structure: Any
    destinations: tuple[tuple[int, ...], ...] | None
    options: CommunicationOptions
    mirrored: tuple[Any, ...] = ()


def require_usable(options: CommunicationOptions) -> None:
    """Refuse options that this machine cannot follow.

    Raises:
        UnavailableError: If they insist on NCCL.
    """
    if options.implementation is CommunicationImplementation.NCCL:
        reason = cuda.current().support.reason
        if reason:
            raise UnavailableError(f'implementation="NCCL" cannot be had: {reason}; or use implementation="AUTO"')
