"""Ranks that are late, that fail and that end: noticed, told and written down."""

from mpidist.transport.failures import job_abort as job_abort
from mpidist.transport.failures import open_groups as open_groups
from mpidist.transport.failures.exit_code import ends_normally as ends_normally
from mpidist.transport.failures.failure_notes import BROKE_OFF as BROKE_OFF
from mpidist.transport.failures.flight_files import FILE_VERSION as FILE_VERSION
from mpidist.transport.failures.flight_files import GroupFlight as GroupFlight
from mpidist.transport.failures.flight_files import flight_folder as flight_folder
from mpidist.transport.failures.open_groups import OpenGroup as OpenGroup
from mpidist.transport.failures.status_board import RESET as RESET
from mpidist.transport.failures.status_board import StatusBoard as StatusBoard
from mpidist.transport.failures.stragglers import Stragglers as Stragglers
from mpidist.transport.failures.watchdog import PROBES as PROBES
from mpidist.transport.failures.watchdog import Watchdog as Watchdog

__all__ = [
    "BROKE_OFF",
    "FILE_VERSION",
    "GroupFlight",
    "Stragglers",
    "StatusBoard",
    "OpenGroup",
    "PROBES",
    "RESET",
    "Watchdog",
    "ends_normally",
    "flight_folder",
    "job_abort",
    "open_groups",
]
