"""Host memory that is kept from call to call, as new pages of the system take longer than to reduce what they hold."""

from mpidist.transport.host_memory.result_memory import (
    LentArrays,
    RecycledResults,
    ResultMemory,
    most_result_bytes,
    node_bytes,
)
from mpidist.transport.host_memory.sum_memory import SumMemory

__all__ = ["LentArrays", "RecycledResults", "ResultMemory", "SumMemory", "most_result_bytes", "node_bytes"]
