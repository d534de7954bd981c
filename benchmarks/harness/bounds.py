"""The least time of an all-reduce between hosts: by their links, or as the cost model predicts."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.transport.costs.cost_model import ALGORITHMS, CostModel


@dataclass(frozen=True)
class Link:
    """The link of each host."""

    hosts: int
    bits_per_second: float  # each way

    def least(self, nbytes: int) -> float:
        """Return the bytes of a message that each host must send at least, to have it summed over all."""
        return 2 * (self.hosts - 1) / self.hosts * nbytes

    def bound(self, way: str, nbytes: int) -> float:
        """Return the seconds that the links need, not compressed."""
        return self.least(nbytes) * 8 / self.bits_per_second


@dataclass(frozen=True)
class Prediction:
    """Predictions of the cost model."""

    model: CostModel
    placement: tuple[int, ...]  # ranks of each host

    def bound(self, way: str, nbytes: int) -> float | None:
        """Return the predicted seconds; `None` for algorithms that mpidist lacks."""
        algorithm = self.model.choose(nbytes, self.placement) if way == "mpidist" else way
        return self.model.seconds(algorithm, nbytes, self.placement) if algorithm in ALGORITHMS else None


Bound = Link | Prediction
