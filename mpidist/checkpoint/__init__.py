"""Checkpoints: the state of a program in files, from which it can continue on other ranks, too."""

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.parts import SavedCheckpoint
from mpidist.checkpoint.preemption import PreemptionCheckpointHandler
from mpidist.checkpoint.saving import SaveRecord

__all__ = ["Checkpoint", "CheckpointManager", "PreemptionCheckpointHandler", "SaveRecord", "SavedCheckpoint"]
