"""Which reduction, and how its data are sent: `ReduceOp`, `CommunicationOptions`."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar, final

import numpy as np

from mpidist.transport import value_text

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Compression",
    "CaseInsensitiveEnum",
    "ReduceOp",
    "options_or_hints",
]

_Named = TypeVar("_Named", bound="CaseInsensitiveEnum")


class CaseInsensitiveEnum(Enum):
    """An enumeration whose members are found by name in any case: `ReduceOp("sum")`."""

    @classmethod
    def of(cls: type[_Named], value: object) -> _Named:
        """Return the member that an argument is or names.

        Quicker than the constructor, which tries all members, and safe for arrays, whose `==` is not a bool.

        Raises:
            ValueError: If the argument is neither a member nor a member's name.
        """
        if isinstance(value, cls):
            return value
        member = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        return cls._missing_(value) if member is None else member

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


# Members are singletons, so identity will do; the hash of `Enum` costs more than the copy of a small call.
CaseInsensitiveEnum.__hash__ = object.__hash__  # type: ignore[method-assign]


@final
class ReduceOp(CaseInsensitiveEnum):
    """The operation of a reduction.

    tf.distribute has `SUM` and `MEAN`; `MIN`, `MAX` and `PROD` are those of other array programs. Every function that
    takes a `ReduceOp` takes its name in any case, too.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"


@final
class CommunicationImplementation(CaseInsensitiveEnum):
    """The implementation of a collective: `AUTO` lets the library choose.

    `RING` passes shards round a ring of all ranks over MPI, and never uses NCCL. `NCCL` reduces device memory by NCCL,
    between nodes, too, so it needs a GPU for each rank: building a strategy raises where CuPy or NCCL is missing, and
    the first call with device memory raises where they cannot be used. It changes nothing for host memory.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation  # its name before TensorFlow 2.4


@final
class Compression(CaseInsensitiveEnum):
    """The dtype in which float32 numbers are sent: `BF16` and `FP16` halve the bytes, `NONE` sends float32.

    Numbers are rounded to nearest before they are sent, added in float32, and the sum is rounded once more. With the
    unit roundoff u, 2^-8 of bfloat16 and 2^-11 of float16, a sum S of contributions, whose absolute values sum up to A,
    has an error of at most ``u (A + abs(S))``, up to terms of u squared; of ``u A`` more where numbers are compressed
    within several nodes and between them. float16 is more exact, but its largest number is 65,504: larger numbers
    become infinite, which is logged and counted by `Strategy.num_overflowed`. Below 2^-14 the error of float16 is
    absolute, 2^-25.
    """

    NONE = "NONE"
    BF16 = "BF16"
    FP16 = "FP16"


@final
@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """Options of collective calls: the defaults of a strategy, or those of one call.

    Args:
        bytes_per_pack: Arrays are grouped, in order, into packs; a pack is closed once it holds more than this many
            bytes. 0 lets the library choose.
        timeout_seconds: How long a call waits for all ranks to join it. `None` and 0 wait for ever.
        implementation: A `CommunicationImplementation` or its name.
        reproducible: Add the contributions in rank order, so that the same ranks give the same bits on any placement
            of ranks on nodes.
        compression: A `Compression` or its name: the dtype in which float32 arrays are sent between nodes. Within a
            node float32 stays float32. Arrays of other dtypes are never compressed.
        compress_everywhere: Compress within nodes, too: every rank's contribution is rounded. `reproducible`, and
            algorithms that do not work node by node, always compress so.

    Raises:
        ValueError: If `bytes_per_pack` or `timeout_seconds` is negative, if `implementation` or `compression` is not
            known, or if `implementation` is `RING` with compression, which would round partial sums at each rank.
        TypeError: If one of these is no number, or if `reproducible` or `compress_everywhere` is no bool.
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
        for name, value in (("reproducible", reproducible), ("compress_everywhere", compress_everywhere)):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{name} is a bool, not {value!r}")
        object.__setattr__(self, "bytes_per_pack", int(bytes_per_pack))
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", CommunicationImplementation(implementation))
        object.__setattr__(self, "reproducible", bool(reproducible))
        object.__setattr__(self, "compression", Compression("NONE" if compression is None else compression))
        object.__setattr__(self, "compress_everywhere", bool(compress_everywhere))
        self._require_compressible()

    @cached_property
    def plan_key(self) -> tuple[Any, ...]:
        """The fields that the plan of a call depends on: all but `timeout_seconds`."""
        how = self.bytes_per_pack, self.implementation, self.reproducible
        return *how, self.compression, self.compress_everywhere

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Override these options by the fields of `other` that are not defaults.

        Args:
            other: The options of one call, or `None`.

        Returns:
            New options; these and `other` do not change. `other` cannot set a field back to its default.

        Raises:
            TypeError: If `other` is neither `CommunicationOptions` nor `None`.
        """
        if other is None:
            return self
        if isinstance(other, TypeError):  # made by `options_or_hints`
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
                f"compression={str(self.compression).lower()!r} cannot be combined with implementation='RING', whose "
                "partial sums would be rounded at every rank; use implementation='AUTO'"
            )


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:  # noqa: N802
    """Make `CommunicationOptions` by the name that tf.distribute gave them before 2.4 (deprecated).

    Args:
        bytes_per_pack: As in `CommunicationOptions`.
        timeout_seconds: As in `CommunicationOptions`.
    """
    warnings.warn("CollectiveHints is deprecated: use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def options_or_hints(
    options: CommunicationOptions | None, experimental_hints: CommunicationOptions | None
) -> CommunicationOptions | Any:
    """Return the options of a call from `options=` or `experimental_hints=`, its name before TensorFlow 2.4.

    Returns:
        The options. If both arguments were given, a `TypeError`, which `CommunicationOptions.merge` raises later: there
        all ranks learn of the error.
    """
    if experimental_hints is None:
        return options
    warnings.warn("experimental_hints is deprecated: use options", DeprecationWarning, stacklevel=3)
    if options is not None:
        return TypeError("options and experimental_hints are two names of one argument: give one of them")
    return experimental_hints
