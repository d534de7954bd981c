"""Which workers a server serves, which of them are lost, and what they wait for each other for."""

from mpidist.parameter_server.attendance.attendance import Attendance
from mpidist.parameter_server.attendance.meetings import Workers, differences_of

__all__ = ["Attendance", "Workers", "differences_of"]
