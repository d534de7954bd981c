"""Which workers a server serves, which of them are lost, and what they wait for each other for."""

from mpidist.parameter_server.attendance.attendance import Attendance
from mpidist.parameter_server.attendance.meetings import Workers

__all__ = ["Attendance", "Workers"]
