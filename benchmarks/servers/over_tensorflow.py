"""TensorFlow's parameter servers over grpc, with a graph and a session on every worker: its leanest way.

Gradients lie in local variables of the worker, and what is read comes to lie in others. All of a push, or of a pull, is
one call of `session.run`. Values become no NumPy arrays.
"""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

from servers.contestant import Contestant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ranks.work import Work

__all__ = ["Servers"]

_ALONE_BYTES = 32 << 20
v1 = tf.compat.v1


class Servers(Contestant):
    """A cluster on ports of this machine, which a file in the folder names. Collective."""

    def __init__(self, folder: Path, place: int, workers: int, servers: int) -> None:
        super().__init__(place, workers, servers)
        v1.disable_eager_execution()
        addresses = [f"localhost:{port}" for port in json.loads((folder / "ports").read_text())]
        cluster = tf.train.ClusterSpec({"worker": addresses[:workers], "ps": addresses[workers:]})
        config = v1.ConfigProto(intra_op_parallelism_threads=1)
        job, index = ("ps", place - workers) if self.serves else ("worker", place)
        self._server = tf.distribute.Server(cluster, job_name=job, task_index=index, config=config)
        self._session: Any = None
        self.versions = {"tensorflow": tf.__version__, "numpy": np.__version__, "python": platform.python_version()}

    def serve(self) -> None:
        """Nothing: TensorFlow's threads serve, as long as this process lives."""

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        shapes = list(work.shapes)
        if len(shapes) == 1 and work.nbytes >= _ALONE_BYTES:
            shapes = [(len(part),) for part in np.array_split(range(work.nbytes // 4), self.servers)]
        adds, reads, here, shared = [], [], [], []
        self.forget()
        with tf.Graph().as_default():
            for at, shape in enumerate(shapes):
                with tf.device(f"/job:ps/task:{at % self.servers}"):
                    variable = v1.get_variable(
                        f"{work.name}_{at}", shape, initializer=v1.zeros_initializer(), use_resource=True
                    )
                shared.append(variable.initializer)
                with tf.device(f"/job:worker/task:{self.rank}"):
                    one, got = (self._local(f"{name}_{self.rank}_{at}", shape) for name in ("one", "got"))
                    reads.append(got.assign(variable.read_value(), read_value=False))
                    value = tf.identity(one.read_value())
                with tf.device(f"/job:ps/task:{at % self.servers}"):
                    adds.append(variable.assign_add(value, read_value=False))
                here.append((one, got))
            push, pull, start = tf.group(adds), tf.group(reads), tf.group(shared)
            own = tf.group([variable.initializer for pair in here for variable in pair])
            values = [got.read_value() for _, got in here]
            session = self._session = v1.Session(self._server.target)
        if self.rank == 0:
            session.run(start)
        self.meet()
        session.run(own)
        run_push, run_pull = session.make_callable(push), session.make_callable(pull)
        self._values = lambda: session.run(values)
        return run_push, run_pull

    def numbers(self, pulled: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._values()
        return found

    @staticmethod
    def _local(name: str, shape: tuple[int, ...]) -> Any:
        ones = v1.ones_initializer()
        return v1.get_variable(name, shape, initializer=ones, use_resource=True, collections=[])

    def forget(self) -> None:
        """Drop the graph, and what the worker holds."""
        if self._session is not None:
            self._session.close()
            self._session = None
