"""When and how what replicas write to a variable is aggregated."""

from __future__ import annotations

from typing import final

from mpidist.options import CaseInsensitiveEnum

__all__ = ["VariableAggregation", "VariableSynchronization", "chosen_synchronization"]


@final
class VariableSynchronization(CaseInsensitiveEnum):
    """When the copies of a variable are aggregated: `AUTO` means `ON_WRITE`."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


@final
class VariableAggregation(CaseInsensitiveEnum):
    """How the values that replicas write or hold are aggregated. `ONLY_FIRST_REPLICA` takes replica 0's."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


def chosen_synchronization(value: VariableSynchronization | str) -> VariableSynchronization:
    """Return what a user chose for a variable of a strategy; refuse NONE."""
    kinds, wanted = VariableSynchronization, VariableSynchronization(value)
    if wanted is kinds.NONE:
        raise ValueError("synchronization NONE is for variables without a strategy; choose ON_WRITE or ON_READ")
    return kinds.ON_WRITE if wanted is kinds.AUTO else wanted
