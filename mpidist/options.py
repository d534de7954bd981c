"""Which reduction, and how its data are sent: `ReduceOp`, `CommunicationOptions`."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, Final, TypeVar, final

from mpidist.transport.text import value_text
from mpidist.whole_number import require_bool, whole_number

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
class _Unset:
    """Sentinel of an omitted argument."""

    def __repr__(self) -> str:
        return "UNSET"


_UNSET: Final[Any] = _Unset()


def _checked_seconds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"timeout_seconds is a number of seconds or None, not {value!r}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"timeout_seconds must be >= 0, got {value}; 0 waits for ever")
    return value


_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "bytes_per_pack": partial(whole_number, "bytes_per_pack, in bytes (0 is automatic),", least=0),
    "timeout_seconds": _checked_seconds,
    "implementation": CommunicationImplementation,
    "reproducible": partial(require_bool, "reproducible"),
    "compression": lambda value: Compression("none" if value is None else value),
    "compress_everywhere": partial(require_bool, "compress_everywhere"),
}


@final
@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """Options of collective calls: the defaults of a strategy, or those of one call.

    Every argument that is given to a call wins over the strategy's, also `False`, `"auto"` and `"none"`.

    Args:
        bytes_per_pack: Arrays are grouped, in order, into packs; a pack is closed once it holds more than this many
            bytes. 0, the default, lets the library choose.
        timeout_seconds: How long a call waits for all ranks to join it; 0 waits for ever. `None` is as if it was not
            given: a call takes the strategy's, and a strategy `MPIDIST_TIMEOUT_SECONDS`, which is for ever by default.
        implementation: A `CommunicationImplementation` or its name; by default `AUTO`.
        reproducible: Add the contributions in rank order, so that the same ranks give the same bits on any placement
            of ranks on nodes. By default `False`.
        compression: A `Compression` or its name: the dtype in which float32 arrays are sent between nodes. Within a
            node float32 stays float32. Arrays of other dtypes are never compressed. By default `NONE`.
        compress_everywhere: Compress within nodes, too: every rank's contribution is rounded. `reproducible`, and
            algorithms that do not work node by node, always compress so. By default `False`.

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
        bytes_per_pack: int = _UNSET,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = _UNSET,
        *,
        reproducible: bool = _UNSET,
        compression: Compression | str | None = _UNSET,
        compress_everywhere: bool = _UNSET,
    ) -> None:
        arguments = {
            "bytes_per_pack": bytes_per_pack,
            "timeout_seconds": _UNSET if timeout_seconds is None else timeout_seconds,
            "implementation": implementation,
            "reproducible": reproducible,
            "compression": compression,
            "compress_everywhere": compress_everywhere,
        }
        # Of arguments that were not given, the class has the defaults.
        vars(self).update({name: _CHECKS[name](it) for name, it in arguments.items() if it is not _UNSET})
        self._require_compressible()

    @cached_property
    def plan_key(self) -> tuple[Any, ...]:
        """The fields that the plan of a call depends on: all but `timeout_seconds`."""
        how = self.bytes_per_pack, self.implementation, self.reproducible
        return *how, self.compression, self.compress_everywhere

    @cached_property
    def overrides(self) -> tuple[tuple[str, Any], ...]:
        """The fields that were given, but for the timeout: part of the key of a repeated call."""
        return tuple((name, value) for name, value in self._all_given().items() if name != "timeout_seconds")

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Override these options by those that were given to `other`.

        Args:
            other: The options of one call, or `None`.

        Returns:
            New options; these and `other` do not change.

        Raises:
            TypeError: If `other` is neither `CommunicationOptions` nor `None`.
            ValueError: If compression of one cannot be combined with the implementation of the other.
        """
        if other is None:
            return self
        if isinstance(other, TypeError):  # made by `options_or_hints`
            raise other
        if not isinstance(other, CommunicationOptions):
            raise TypeError(f"options must be a CommunicationOptions or None, got {type(other).__name__}")
        return CommunicationOptions(**self._all_given() | other._all_given())

    def _all_given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in _CHECKS}

    def _require_compressible(self) -> None:
        if self.compression is not Compression.NONE and self.implementation is CommunicationImplementation.RING:
            raise ValueError(
                f"compression={str(self.compression).lower()!r} cannot be combined with implementation='ring', whose "
                "partial sums would be rounded at every rank; use implementation='auto'"
            )


def CollectiveHints(  # noqa: N802
    bytes_per_pack: int = _UNSET, timeout_seconds: float | None = None
) -> CommunicationOptions:
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

    If both were given, a `TypeError`, which `CommunicationOptions.merge` raises later, on all ranks.
    """
    if experimental_hints is None:
        return options
    warnings.warn("experimental_hints is deprecated: use options", DeprecationWarning, stacklevel=3)
    if options is not None:
        return TypeError("options and experimental_hints are two names of one argument: give one of them")
    return experimental_hints
