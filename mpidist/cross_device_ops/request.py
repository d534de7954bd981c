"""What a caller of a reduction asks for."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from mpidist.options import CommunicationOptions, ReduceOp

__all__ = ["Request"]


@final
class Request(NamedTuple):
    """What a caller asks for: everything about a call but the values. Equal on all ranks.

    Attributes:
        call: The name of the call, for errors and logs.
        op: The reduction.
        structure: The form of the nest, from `nest.flatten`.
        destinations: The ranks of each value's result; `None` for all ranks everywhere.
        options: How it shall travel.
    """

    call: str
    op: ReduceOp
    structure: Any
    destinations: tuple[tuple[int, ...], ...] | None
    options: CommunicationOptions
