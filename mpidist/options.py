"""Which reduction, and how it should travel: `ReduceOp`, `CommunicationOptions`."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar, final

from mpidist.transport import value_text

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Compression",
    "NamedInAnyCase",
    "ReduceOp",
    "options_or_hints",
]

_Named = TypeVar("_Named", bound="NamedInAnyCase")


class NamedInAnyCase(Enum):
    """An enumeration whose members are found by name in any case: `ReduceOp("sum")`."""

    @classmethod
    def of(cls: type[_Named], value: object) -> _Named:
        """Find the member that an argument means: itself, or its name.

        Raises:
            ValueError: If it means none, whatever it is: the constructor would compare an array with each name.
        """
        if isinstance(value, cls):
            return value
        member = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        return cls._missing_(value) if member is None else member  # quicker than the constructor, which tries all

    @classmethod
    def _missing_(cls: type[_Named], value: object) -> _Named:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(cls.__members__)
        raise ValueError(
            f"{value_text(value)} is not a valid {cls.__name__}; it is one of {names}, or such a name as a string"
        )

    def __str__(self) -> str:
        return self.name


# Members are single; the hash of `Enum`, written in Python, costs more than the copy of a small call.
NamedInAnyCase.__hash__ = object.__hash__  # type: ignore[method-assign]


@final
class ReduceOp(NamedInAnyCase):
    """How the values of the ranks become one.

    `SUM` and `MEAN` are those of tf.distribute; `MIN`, `MAX` and `PROD` are what other array codes reduce with.
    Wherever one is asked for, its name in any case will do.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"


@final
class CommunicationImplementation(NamedInAnyCase):
    """Who carries a collective: `AUTO` lets the library choose.

    `RING` passes shards round a ring of all ranks over MPI, and never uses NCCL. `NCCL` insists on NCCL, between
    nodes, too, so it needs a GPU for each rank: a strategy refuses to be built where CuPy or NCCL is missing, and its
    first call of device memory where they cannot be used. Host memory goes the way it always does.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation  # its name before TensorFlow 2.4


@final
class Compression(NamedInAnyCase):
    """In what precision float32 numbers are sent: `BF16` and `FP16` halve the bytes, `NONE` keeps them as they are.

    Numbers are rounded to nearest as they leave, added in float32, and the sum is rounded once more. With the unit
    roundoff u, 2^-8 of bfloat16 and 2^-11 of float16, a sum S of contributions, whose absolute values sum up to A, is
    off by at most ``u (A + abs(S))``, up to terms of u squared; by ``u A`` more where numbers are compressed within
    several nodes and between them. float16 is more exact, but ends at 65,504: larger numbers become infinite, which
    the log says, and `Strategy.num_overflowed` counts; below 2^-14 its error is absolute, 2^-25.
    """

    NONE = "NONE"
    BF16 = "BF16"
    FP16 = "FP16"


@final
@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """Hints for collective calls: of a whole strategy, or of one call.

    Args:
        bytes_per_pack: Gradients are grouped, in order, into packs that close once they hold more than this many
            bytes. 0 lets the library choose.
        timeout_seconds: How long a call waits for all ranks to join it. `None` and 0 wait for ever.
        implementation: A `CommunicationImplementation` or its name.
        reproducible: Add the contributions in rank order, so that the same ranks give the same bits however they
            are placed on nodes.
        compression: A `Compression` or its name: what float32 arrays are rounded to for the way between nodes. What
            ranks of a node send each other stays float32. Arrays of other dtypes are sent as they are.
        compress_everywhere: Compress within nodes, too: every rank's contribution is rounded. So it is with
            `reproducible`, too, and with algorithms that do not work node by node.

    Raises:
        ValueError: If `bytes_per_pack` or `timeout_seconds` is negative, or `implementation` or `compression` is not
            known, or a ring is to be compressed, whose partial sums must not be rounded at each rank.
        TypeError: If one of them is not a number.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    reproducible: bool = False
    compression: Compression = Compression.NONE
    compress_everywhere: bool = False

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        *,
        reproducible: bool = False,
        compression: Compression | str | None = Compression.NONE,
        compress_everywhere: bool = False,
    ) -> None:
        if isinstance(bytes_per_pack, bool) or not isinstance(bytes_per_pack, numbers.Integral):
            raise TypeError(f"bytes_per_pack is a whole number of bytes, not {bytes_per_pack!r}")
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0 bytes, got {bytes_per_pack}; 0 means automatic")
        if timeout_seconds is not None:
            if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, numbers.Real):
                raise TypeError(f"timeout_seconds is a number of seconds or None, not {timeout_seconds!r}")
            if math.isnan(timeout_seconds) or timeout_seconds < 0:
                raise ValueError(f"timeout_seconds must be >= 0, got {timeout_seconds}; 0 and None wait for ever")
        object.__setattr__(self, "bytes_per_pack", int(bytes_per_pack))
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", CommunicationImplementation(implementation))
        object.__setattr__(self, "reproducible", bool(reproducible))
        object.__setattr__(self, "compression", Compression("NONE" if compression is None else compression))
        object.__setattr__(self, "compress_everywhere", bool(compress_everywhere))
        self._require_compressible()

    @cached_property
    def plan_key(self) -> tuple[Any, ...]:
        """All that plans of calls depend on: everything but the deadline."""
        how = self.bytes_per_pack, self.implementation, self.reproducible
        return *how, self.compression, self.compress_everywhere

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Lay the fields of `other` that are not defaults over these.

        Args:
            other: The options of one call, or `None`.

        Returns:
            New options; neither operand changes. A call cannot put a field back to its default.

        Raises:
            TypeError: If `other` is something else.
        """
        if other is None:
            return self
        if isinstance(other, TypeError):  # of `options_or_hints`
            raise other
        if not isinstance(other, CommunicationOptions):
            raise TypeError(f"options must be a CommunicationOptions or None, got {type(other).__name__}")
        return CommunicationOptions(
            other.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds,
            self.implementation if other.implementation is CommunicationImplementation.AUTO else other.implementation,
            reproducible=other.reproducible or self.reproducible,
            compression=self.compression if other.compression is Compression.NONE else other.compression,
            compress_everywhere=other.compress_everywhere or self.compress_everywhere,
        )

    def _require_compressible(self) -> None:
        if self.compression is not Compression.NONE and self.implementation is CommunicationImplementation.RING:
            raise ValueError(
                f"compression={str(self.compression).lower()!r} cannot be had with implementation='RING', whose "
                "partial sums would be rounded at every rank; use implementation='AUTO'"
            )


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:  # noqa: N802
    """Make `CommunicationOptions` under the name that tf.distribute gave them before 2.4 (deprecated).

    Args:
        bytes_per_pack: As in `CommunicationOptions`.
        timeout_seconds: As in `CommunicationOptions`.

    Returns:
        A `CommunicationOptions`.
    """
    warnings.warn("CollectiveHints is deprecated: use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def options_or_hints(
    options: CommunicationOptions | None, experimental_hints: CommunicationOptions | None
) -> CommunicationOptions | Any:
    """Take the options of a call, also under the name that they had before TensorFlow 2.4.

    Returns:
        The options. If both were given, an error in their place, which `CommunicationOptions.merge` raises: where all
        ranks learn of it.
    """
    if experimental_hints is None:
        return options
    warnings.warn("experimental_hints is deprecated: use options", DeprecationWarning, stacklevel=3)
    if options is not None:
        return TypeError("options and experimental_hints are two names of one argument: give one of them")
    return experimental_hints
