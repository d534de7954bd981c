"""Names that tf.distribute keeps under `experimental`."""

from mpidist.options import CollectiveHints as CollectiveHints
from mpidist.options import CommunicationImplementation as CommunicationImplementation
from mpidist.options import CommunicationOptions as CommunicationOptions
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy

__all__ = [
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
]
