"""Failures: find ranks that are late or lost, tell the other ranks, record calls, end the job."""

from mpidist.transport.failures import job_abort, open_groups
from mpidist.transport.failures.awaited_peers import AwaitedPeers
from mpidist.transport.failures.call_watchdog import CallWatchdog
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.failures.failure_notes import BROKE_OFF
from mpidist.transport.failures.flight_files import FILE_VERSION, GroupFlight, flight_folder
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightRecorder
from mpidist.transport.failures.open_groups import OpenGroup
from mpidist.transport.failures.process_state import GONE, RUNNING, UNKNOWN, Process
from mpidist.transport.failures.status_board import RESET, StatusBoard
from mpidist.transport.failures.stragglers import Awaited, Stragglers
from mpidist.transport.failures.watchdog import PROBES, Watchdog

__all__ = [
    "Awaited",
    "AwaitedPeers",
    "BROKE_OFF",
    "CallWatchdog",
    "FILE_VERSION",
    "FLIGHT_BYTES",
    "FlightRecorder",
    "GONE",
    "GroupFlight",
    "Stragglers",
    "StatusBoard",
    "OpenGroup",
    "PROBES",
    "Process",
    "RESET",
    "RUNNING",
    "UNKNOWN",
    "Watchdog",
    "ends_normally",
    "flight_folder",
    "job_abort",
    "open_groups",
]
