"""What a call is made of: staging, waiting for ranks, exchange, adding."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from mpidist.cli.trace.files import TracedCall

__all__ = ["ADDING", "EXCHANGE", "STAGING", "WAITING", "Phase", "phases_of"]

STAGING: Final = "staging"
WAITING: Final = "waiting for ranks"
EXCHANGE: Final = "exchange"
ADDING: Final = "adding"


@final
class Phase(NamedTuple):
    """A part of a call, in nanoseconds."""

    name: str
    begun: int
    ended: int


def phases_of(call: TracedCall) -> list[Phase]:
    """Cut a call into its phases.

    `STAGING` is before the rank joins the call, `WAITING` until all ranks have. Then `EXCHANGE` is waiting for data of
    other ranks, and `ADDING` all else: this rank adds and copies. Of a call that was started, and of what a program
    does meanwhile, only waits are known. A call that not all ranks make together is a request: all of it is exchange.
    """
    phases = [Phase(STAGING, call.entered, call.begun)] if call.entered else []
    if not call.sequence:
        return [*phases, Phase(EXCHANGE, call.begun, call.ended)]
    agreed = call.agreed or call.ended
    is_started = call.name.startswith("start_")
    if not is_started:
        phases.append(Phase(WAITING, call.begun, agreed))
    at = agreed
    for begun, ended in call.waits:
        if is_started and begun < agreed:
            phases.append(Phase(WAITING, begun, min(ended, agreed)))
        if ended <= at:
            continue
        begun = max(begun, at)
        if begun > at and not is_started:
            phases.append(Phase(ADDING, at, begun))
        phases.append(Phase(EXCHANGE, begun, ended))
        at = ended
    if call.ended > at and not is_started:
        phases.append(Phase(ADDING, at, call.ended))
    return [phase for phase in phases if phase.ended > phase.begun]
