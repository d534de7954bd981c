"""Do all ranks make the same call? Asked before data moves."""

from mpidist.transport.agreement.agreement import CLOSE, END, Agreement, Call, CallRecord, Progress, SoloAgreement
from mpidist.transport.agreement.comparison_rounds import NodeRounds
from mpidist.transport.agreement.fingerprint import fingerprint_of, name_digest
from mpidist.transport.agreement.mismatch_report import mismatch_error
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.agreement.step_exit import StepExit
from mpidist.transport.agreement.stop_notice import StopNotice

__all__ = [
    "Agreement",
    "Call",
    "CallRecord",
    "CLOSE",
    "END",
    "MpiAgreement",
    "NodeRounds",
    "Progress",
    "SoloAgreement",
    "StepExit",
    "StopNotice",
    "fingerprint_of",
    "mismatch_error",
    "name_digest",
]
