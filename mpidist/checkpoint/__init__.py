"""Checkpoints: the state of a program in files, which it goes on from with other ranks, too.

checkpoint   what a program saves: named nests
manager      numbered checkpoints in a folder
leaves       the kinds of leaves of the nests
preemption   save and leave when a job is to be preempted
saving       how ranks save together; restoring: how they restore; record: what a save has cost
saved        a checkpoint that is read; parts: its files; files: its folder
"""

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.preemption import PreemptionCheckpointHandler
from mpidist.checkpoint.record import SaveRecord
from mpidist.checkpoint.saved import SavedCheckpoint

__all__ = ["Checkpoint", "CheckpointManager", "PreemptionCheckpointHandler", "SaveRecord", "SavedCheckpoint"]
