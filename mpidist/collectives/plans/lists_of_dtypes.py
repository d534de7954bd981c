"""Lists of arrays of several dtypes, reduced again and again."""

from __future__ import annotations

from typing import Any, final

from mpidist.collectives.arguments.operands import NO_OPERANDS
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.repeated_reductions import Array, RepeatedReduction
from mpidist.transport.native.loading import native

__all__ = ["ListsOfDtypes"]


@final
class ListsOfDtypes(RepeatedReduction):
    """Reduces lists of contiguous private arrays of several dtypes, as their execution does.

    `call`: a call of such a list, into new arrays or in place, that is done.
    """

    def __init__(self, execution: Execution, call: ReductionCall) -> None:
        self._execution = execution
        self._forms = [(spec.shape, spec.dtype) for spec in call.plan.specs]
        self._call = ReductionCall(call.name, call.op, call.options, (), call.structure)
        self._call.checked_outs = call.checked_outs

    def fits(self, arrays: list[Any]) -> bool:
        """Whether a list of the right length has such arrays: NumPy's, contiguous, of the right shapes and dtypes."""
        return bool(native.have_forms(arrays, self._forms, False, False))

    def lend(self) -> tuple[list[Array], int]:
        return [], 0  # `finish` makes the arrays

    def begin(self, value: list[Array], result: list[Array], place: int) -> ReductionCall:
        call = self._call
        call.operands, call.outs = NO_OPERANDS.with_arrays(value), result or None
        self._execution.begin(call)
        return call

    def finish(self, begun: ReductionCall, result: list[Array]) -> None:
        result[:] = self._execution.finish(begun, has_same_places=True)
        self.forget()

    def close(self, result: list[Array], is_new: bool) -> list[Array]:
        return result

    def forget(self) -> None:
        self._call.operands, self._call.outs, self._call.state = NO_OPERANDS, None, None
