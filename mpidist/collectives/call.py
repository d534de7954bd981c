"""One reducing call: what is asked for, what is planned once for calls alike, and who carries a call out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments import NO_OPERANDS, Operands, Spec
from mpidist.collectives.out_arrays import CheckedOuts
from mpidist.collectives.signature import names_of
from mpidist.nest import form_text
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import CallRecord, FusedReducer, Levels, Pending, Reduction, Steps, name_ranks

__all__ = ["Algorithm", "Execution", "Plan", "Reduce", "ReductionCall"]

Reduce = Callable[[Levels, Any, Reduction], None]  # reduces a flat buffer [n] of all ranks in place
Destinations = tuple[int, ...]


class Algorithm(ABC):
    """How the ranks' flat buffers become one: what plans ask an all-reduce algorithm."""

    @property
    @abstractmethod
    def configuration(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""

    @property
    @abstractmethod
    def num_packs(self) -> int:
        """As in `messages_of`."""

    @property
    @abstractmethod
    def compresses_between_nodes(self) -> bool:
        """Whether the algorithm can round what leaves a node alone; else every rank rounds what it contributes."""

    def require_ranks(self, size: int) -> None:  # noqa: B027  any number will do, for most
        """Refuse to work on this number of ranks, with a `ValueError`. Local."""

    @abstractmethod
    def name_for(self, options: CommunicationOptions) -> str:
        """Name what serves calls with these options, for logs."""

    @abstractmethod
    def fused_reducer_for(self, options: CommunicationOptions, levels: Levels) -> FusedReducer | None:
        """Say who reduces lists of arrays in this algorithm's place, if anybody does."""

    @abstractmethod
    def all_reduce_for(self, options: CommunicationOptions) -> Reduce:
        """Return what leaves the reduction with every rank."""

    @abstractmethod
    def reduce_to(self, root: int) -> Reduce:
        """Return what leaves the reduction with one rank."""


class Execution(ABC):
    """Carries out the calls of one plan."""

    def prepare(self, call: ReductionCall, is_later: bool) -> None:  # noqa: B027  nothing, for most
        """Look at arguments in device memory, before the call is begun. Local; what it raises, all ranks learn of.

        Args:
            call: The call.
            is_later: Whether other calls come before this one.
        """

    def begin(self, call: ReductionCall) -> None:  # noqa: B027  nothing, for some
        """Do what can be done before the ranks agree on the call, and can be left at that. Local, as `prepare`."""

    @abstractmethod
    def finish(self, call: ReductionCall, has_same_placement: bool) -> list[Any]:
        """Reduce. Collective: the ranks have agreed on the call.

        Args:
            call: The call.
            has_same_placement: Whether all ranks have the same `placement`.

        Returns:
            The results, where the caller wants them.
        """

    @abstractmethod
    def steps(self, call: ReductionCall, pending: Pending, has_same_placement: bool) -> Steps:
        """Reduce, as `finish` does, in the steps of a call that was started."""


@final
class Plan:
    """What is decided once for all calls of the same op, options, nest, shapes and dtypes.

    Args:
        fingerprint: A digest of what all ranks must agree on, but for the name of the call.
        configuration: Of the algorithm.
        specs: The arrays.
        results: The dtype of each result.
        execution: Who carries such calls out.
        details: What the flight recorder says of them.

    Attributes:
        uses_device: Whether some arrays lie in device memory.
        checked_outs: The `out` arrays that were checked for such calls, by the address of the first.
    """

    def __init__(
        self,
        fingerprint: int,
        configuration: tuple[Any, ...],
        specs: Sequence[Spec],
        results: Sequence[np.dtype[Any]],
        execution: Execution,
        details: str,
    ) -> None:
        self.fingerprint = fingerprint
        self.configuration = configuration
        self.specs = specs
        self.results = results
        self.execution = execution
        self.details = details
        self.uses_device = any(spec.device for spec in specs)
        self.checked_outs: dict[int, CheckedOuts] = {}


@final
class ReductionCall(CallRecord):
    """One reducing call of this rank.

    Args:
        name: What errors and logs call it.
        op: The reduction.
        options: How it shall travel.
        values: The leaves that travel: this rank's contributions.
        structure: The form of the nest; with destinations, of each nest.
        mirrored: Which leaves of the nest stay where they are; with destinations, of each nest.
        destinations: The ranks of each value's result; `None` for all ranks everywhere.
        outs: Arrays that take the results.
        error: What is known to be wrong with this rank's arguments.

    Attributes:
        operands: The values, opened.
        plan: What is planned for calls like this one; set once the values were opened.
        checked_outs: What is known of the outs.
        state: What its execution keeps of it.
    """

    plan: Plan

    def __init__(
        self,
        name: str,
        op: ReduceOp,
        options: CommunicationOptions,
        values: Sequence[Any],
        structure: Any,
        mirrored: tuple[Any, ...] = (),
        destinations: tuple[Destinations, ...] | None = None,
        outs: Sequence[Any] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.name = name
        self.op = op
        self.options = options
        self.timeout_seconds = options.timeout_seconds
        self.values = values
        self.structure = structure
        self.mirrored = mirrored
        self.destinations = destinations
        self.outs = outs
        self.error = error
        self.operands: Operands = NO_OPERANDS
        self.checked_outs: CheckedOuts | None = None
        self.state: Any = None

    def describe(self) -> Mapping[str, str]:
        options, checked = self.options, self.checked_outs
        per_node = [] if checked is None else checked.per_node_indices
        fields = {
            "cross_device_ops": str(self.plan.configuration),
            "outs that are per-node arrays": ", ".join(f"out {index}" for index in per_node) or "none",
            "op": str(self.op),
            "number of arrays": str(len(self.plan.specs)),
            "bytes_per_pack": str(options.bytes_per_pack),
            "implementation": str(options.implementation),
            "reproducible": str(options.reproducible),
            "compression": str(options.compression),
            "compress_everywhere": str(options.compress_everywhere),
        }
        if self.destinations is None:
            structures, kept = (self.structure,), (self.mirrored,)
        else:
            fields["destinations"] = "; ".join(name_ranks(ranks) for ranks in self.destinations)
            structures, kept = self.structure, self.mirrored
        names, mirrored = names_of(structures, kept)
        fields["mirrored"] = ", ".join(mirrored) or "none"
        forms = "; ".join(map(form_text, structures))
        fields |= {name: repr(spec) for name, spec in zip(names, self.plan.specs, strict=True)}
        return fields | {"form of the nest": forms}
