"""Do all ranks make the same call? Asked before data moves."""

from mpidist.transport.agreement.agreement import CLOSE as CLOSE
from mpidist.transport.agreement.agreement import END as END
from mpidist.transport.agreement.agreement import Agreement as Agreement
from mpidist.transport.agreement.agreement import Call as Call
from mpidist.transport.agreement.agreement import CallRecord as CallRecord
from mpidist.transport.agreement.agreement import SoloAgreement as SoloAgreement
from mpidist.transport.agreement.comparison_rounds import NodeRounds as NodeRounds
from mpidist.transport.agreement.mismatch_report import differing as differing
from mpidist.transport.agreement.mpi_agreement import MpiAgreement as MpiAgreement

__all__ = [
    "Agreement",
    "Call",
    "CallRecord",
    "CLOSE",
    "END",
    "MpiAgreement",
    "NodeRounds",
    "SoloAgreement",
    "differing",
]
