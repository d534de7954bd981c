"""Variables: arrays that a strategy keeps on every rank."""

from mpidist.variables import mirrored as mirrored  # each kind of variable registers itself
from mpidist.variables import sync_on_read as sync_on_read
