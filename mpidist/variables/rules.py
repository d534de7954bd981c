"""When and how what replicas write to a variable is aggregated."""

from __future__ import annotations

from typing import final

from mpidist.options import CaseInsensitiveEnum

__all__ = ["VariableAggregation", "VariableSynchronization"]


@final
class VariableSynchronization(CaseInsensitiveEnum):
    """When the copies of a variable are aggregated: `AUTO` means `ON_WRITE`."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def chosen(cls, value: VariableSynchronization | str) -> VariableSynchronization:
        """Return what a user chose for a variable of a strategy.

        Raises:
            ValueError: If it is NONE, or none of these.
        """
        wanted = cls(value)
        if wanted is cls.NONE:
            raise ValueError("synchronization NONE is for variables without a strategy; choose ON_WRITE or ON_READ")
        return cls.ON_WRITE if wanted is cls.AUTO else wanted


@final
class VariableAggregation(CaseInsensitiveEnum):
    """How the values that replicas write or hold are aggregated. `ONLY_FIRST_REPLICA` takes replica 0's."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
