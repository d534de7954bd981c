"""ChainerMN, its naive communicator: what its optimizer does with a model's gradients. They become means, not sums."""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

warnings.filterwarnings("ignore")  # of a library that is no longer looked after

import chainer  # noqa: E402
import chainermn  # noqa: E402

from ranks.way import Library, Way  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ranks.work import Work

__all__ = ["ChainerMN"]


class ChainerMN(Library):
    """The naive communicator: an `Allreduce` in place and a division for each parameter. Collective."""

    def __init__(self) -> None:
        self._chainermn = chainermn.create_communicator("naive")
        self.rank, self.size = self._chainermn.rank, self._chainermn.size
        name, version = MPI.get_vendor()
        self.versions = {
            "chainermn": chainer.__version__,
            "mpi": f"{name} {'.'.join(map(str, version))}",
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def ways(self, work: Work) -> dict[str, Way]:
        """List the one way, over a model that has the arrays as its gradients."""
        arrays = [work.empty() for _ in range(work.calls)]
        models = [_model(of) for of in arrays]

        def call(at: int) -> Any:
            self._chainermn.multi_node_mean_grad(models[at])
            return arrays[at]

        def sums(means: Sequence[Any]) -> Sequence[Any]:
            return [mean * self.size for mean in means]

        return {"chainermn naive": Way(arrays, call, results=sums)}


def _model(gradients: Sequence[Any]) -> Any:
    model = chainer.Link()
    with model.init_scope():
        for at, gradient in enumerate(gradients):
            parameter = chainer.Parameter(gradient)  # its values are never read: they share the memory
            parameter.grad = gradient
            setattr(model, f"p{at:06}", parameter)
    return model
