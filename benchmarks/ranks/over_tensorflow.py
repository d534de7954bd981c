"""TensorFlow's MultiWorkerMirroredStrategy with its RING, in a tf.function: a tensor at a time, and in packs."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from ranks.way import Library, Way

if TYPE_CHECKING:
    from pathlib import Path

    from ranks.work import Work

__all__ = ["TensorFlow"]

_PACK_BYTES = 25 << 20
_MOST_TENSORS = 2000  # tracing 10 000 takes more than five minutes


class TensorFlow(Library):
    """A cluster of workers on ports of this machine, which a file in the folder names. Collective."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        workers = json.loads((folder / "ports").read_text())
        cluster = {"worker": [f"localhost:{port}" for port in workers]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=_options(0))
        self.versions = {
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def ways(self, work: Work) -> dict[str, Way]:
        """List both ways; both return new tensors."""
        arrays = [work.empty() for _ in range(work.calls)]
        tensors: list[list[Any]] = [[] for _ in arrays]

        def load() -> None:
            for at, of in enumerate(arrays):
                tensors[at] = [tf.convert_to_tensor(array) for array in of]

        def way(bytes_per_pack: int) -> Way:
            reduce = self._reduce(_options(bytes_per_pack))
            as_numpy = lambda results: [one.numpy() for one in results]  # noqa: E731
            return Way(arrays, lambda at: reduce(tensors[at]), results=as_numpy, load=load)

        if len(work.shapes) > _MOST_TENSORS:
            return {}
        return {"tensorflow": way(0), **({"tensorflow packs": way(_PACK_BYTES)} if work.kind == "list" else {})}

    def _reduce(self, options: Any) -> Any:
        def in_replica(tensors: Any) -> Any:
            context = tf.distribute.get_replica_context()
            placed = [tf.identity(tensor) for tensor in tensors]  # an argument has no device, which it wants
            return context.all_reduce(tf.distribute.ReduceOp.SUM, placed, options=options)

        return tf.function(lambda tensors: self._strategy.run(in_replica, args=(tensors,)))

    def forget(self) -> None:
        """Drop the traced functions, and what they hold."""
        tf.keras.backend.clear_session()


def _options(bytes_per_pack: int) -> Any:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    return tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack, implementation=ring)
