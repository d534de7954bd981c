"""The types of one reducing call: the call, its plan (made once for equal calls), its execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments.checked_outs import CheckedOuts, KnownOuts
from mpidist.collectives.arguments.operands import NO_OPERANDS, Operands, Spec
from mpidist.collectives.arguments.signature import names_of
from mpidist.collectives.plans.device_program import DeviceProgram
from mpidist.collectives.plans.local_sums import LocalSums
from mpidist.nest.text import form_text
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport.agreement.agreement import CallRecord
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.text import name_ranks

__all__ = ["Execution", "Plan", "ReductionCall"]

Destinations = tuple[int, ...]


class Execution(ABC):
    """Carries out the calls of one plan.

    Attributes:
        can_join_ahead: Whether a started call may begin, and its comparison, while the calls before it are under way.
    """

    can_join_ahead = False

    def prepare(self, call: ReductionCall, is_started: bool) -> None:  # noqa: B027  most do nothing
        """Check arguments in device memory, before `begin`. Local; if it raises, all ranks raise the error.

        `is_started`: calls before this one may not be done.
        """

    def can_repeat(self, call: ReductionCall) -> bool:
        """Whether calls like one that is prepared, with arrays at the same addresses of GPUs, are carried out alike."""
        return False

    def begin(self, call: ReductionCall) -> None:  # noqa: B027  some do nothing
        """Begin before the ranks agree: nothing needs other ranks, or has to be undone if they do not agree.

        Local; if it raises, all ranks raise the error.
        """

    @abstractmethod
    def finish(self, call: ReductionCall, has_same_places: bool) -> list[Any]:
        """Reduce; return native results, or the outs where results were made there. Collective; the ranks have agreed.

        `has_same_places`: the arguments of all ranks lie at the same places (`CallRecord.variant`).
        """

    @abstractmethod
    def steps(self, call: ReductionCall, pending: Pending, has_same_places: bool) -> Steps:
        """Reduce as `finish` does, in the steps of a started call."""


@final
@dataclass(eq=False, repr=False)
class Plan:
    """Plan of all calls with one signature: op, options, nest, shapes and dtypes.

    Args:
        fingerprint: A digest of the signature, equal on all ranks, without the name of the call.
        configuration: The algorithm, its parameters and options.
        details: The calls in a few words, for the flight recorder.
        local_sums: Adds the replicas of this rank before `execution` begins; `None` if there is nothing to add.
    """

    fingerprint: int
    configuration: tuple[Any, ...]
    specs: Sequence[Spec]
    result_dtypes: Sequence[np.dtype[Any]]
    execution: Execution
    details: str
    local_sums: LocalSums | None = None

    def __post_init__(self) -> None:
        self.uses_device = any(spec.device for spec in self.specs)

    @cached_property
    def known_outs(self) -> KnownOuts:
        """The outs of earlier calls."""
        return KnownOuts(self.specs, self.result_dtypes)


@final
@dataclass(eq=False, repr=False)
class ReductionCall(CallRecord):
    """One reducing call of this rank.

    Args:
        values: The leaves that are sent: the contributions of this rank's first replica.
        structure: The form of the nest.
        mirrored: The indices of the nest's mirrored leaves, which are not sent.
        destinations: The ranks that get each value's result; `None` if all ranks get all results.
        error: An error in this rank's arguments that was found before; `None` for none.
        others: The contributions of each other replica of this rank.

    Attributes:
        operands: The values as native arrays; of several replicas, this rank's sums.
        components: [replicas of this rank][arrays], the native arrays of each; empty where a rank is one replica.
        plan: The plan; set after `operands`.
        checked_outs: The outs, checked; `None` without outs.
        per_node_indices: The indices of outs that are per-node arrays.
        other_outs: The outs of each other replica of this rank. They are checked; the caller copies the results there.
        state: Whatever the execution stores in the call between `begin` and `finish`.
        is_left_out: Whether the execution is to be prepared later, after additions of replicas are compiled.
        device_key: The call's key in `DeviceCalls`; `None` for no key.
        programs: Of a call that is described by its key already, the programs of calls with that key: by a description
            of new results, `None` for others.
    """

    name: str
    op: ReduceOp
    options: CommunicationOptions
    values: Sequence[Any]
    structure: Any
    mirrored: tuple[Any, ...] = ()
    destinations: tuple[Destinations, ...] | None = None
    outs: Sequence[Any] | None = None
    error: Exception | None = None
    others: Sequence[Sequence[Any]] = ()
    plan: Plan = field(init=False)
    operands: Operands = field(default=NO_OPERANDS, init=False)
    components: Sequence[Sequence[Any]] = field(default=(), init=False)
    checked_outs: CheckedOuts | None = field(default=None, init=False)
    per_node_indices: Sequence[int] = field(default=(), init=False)
    other_outs: Sequence[Sequence[Any]] = field(default=(), init=False)
    state: Any = field(default=None, init=False)
    is_left_out: bool = field(default=False, init=False)
    device_key: Any = field(default=None, init=False)
    programs: dict[Any, DeviceProgram] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.timeout_seconds = self.options.timeout_seconds

    def like(self) -> ReductionCall:
        """Return the same call, without arrays."""
        like = ReductionCall(self.name, self.op, self.options, (), self.structure, self.mirrored, self.destinations)
        like.plan, like.details, like.fingerprint = self.plan, self.plan.details, self.fingerprint
        like.per_node_indices, like.is_started = self.per_node_indices, self.is_started
        return like

    def describe(self) -> Mapping[str, str]:
        options, per_node = self.options, self.per_node_indices
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
        to_all = [] if self.destinations is None else [name_ranks(ranks) for ranks in self.destinations]
        fields["destinations"] = "; ".join(to_all) or "all ranks"
        names, mirrored_names = names_of(self.structure, self.mirrored)
        fields["mirrored"] = ", ".join(mirrored_names) or "none"
        fields |= {name: repr(spec) for name, spec in zip(names, self.plan.specs, strict=True)}
        return fields | {"form of the nest": form_text(self.structure)}

    def names(self) -> list[str]:
        """Name the arrays that are reduced."""
        return names_of(self.structure, self.mirrored)[0]
