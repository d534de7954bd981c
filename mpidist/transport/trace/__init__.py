"""Traces: the calls of all ranks and what each call was made of, in files that can be merged."""

from mpidist.transport.trace.begin_and_end import Gather, Seat, begin_trace, end_trace
from mpidist.transport.trace.clocks import ClockSample
from mpidist.transport.trace.trace import TRACE_VERSION, Trace

__all__ = [
    "ClockSample",
    "Gather",
    "Seat",
    "TRACE_VERSION",
    "Trace",
    "begin_trace",
    "end_trace",
]
