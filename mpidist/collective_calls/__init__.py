"""The collective calls of a strategy."""

from mpidist.collective_calls.collective_calls import CollectiveCalls

__all__ = ["CollectiveCalls"]
