"""Solve -u'' = f on [0, 1] with a network that is trained on the equation alone, with random numbers on each replica.

    python physics_informed.py                                  one rank, no launcher
    mpiexec -n 3 python physics_informed.py                     three ranks, the same weights, bit for bit
    mpiexec -n 4 python physics_informed.py --steps 150 --checkpoints kept
    mpiexec -n 3 python physics_informed.py --steps 300 --checkpoints kept

The number of replicas is chosen, whatever the number of ranks. At each step a replica draws points of its own, and sums
the gradients of the equation's residual there; sums of replicas are added in one order on any number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np

import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

UNITS, POINTS = 32, 64  # hidden units; points of each replica at a step


def source(x: Any) -> Any:
    """Return f, for which the solution is sin(pi x)."""
    return np.pi**2 * np.sin(np.pi * x)


def make_network(seed: int) -> list[Any]:
    """Make the weights of u(x) = x (1 - x) (v . tanh(w x + b) + c), in this order: w, b, v, c."""
    random = np.random.default_rng(seed)
    return [random.normal(0, 3, UNITS), random.normal(0, 3, UNITS), random.normal(0, 0.2, UNITS), np.zeros(1)]


def solution(network: list[Any], x: Any) -> Any:
    """Return u at some points."""
    w, b, v, c = network
    return x * (1 - x) * (np.tanh(np.multiply.outer(x, w) + b) @ v + c)


def residual_gradients(network: list[Any], seed: int, step: int) -> tuple[list[Any], Any]:
    """Return the gradients of the summed squared residuals -u'' - f at this replica's points, and that sum."""
    context = mpidist.get_replica_context()
    assert context is not None
    x = context.rng(seed, step).random(POINTS)[:, None]
    w, b, v, c = network
    edge, slope = x * (1 - x), 1 - 2 * x  # vanishes at both ends, and its derivative; the second one is -2
    t = np.tanh(x * w + b)
    first = 1 - t * t  # derivatives of tanh
    second = -2 * t * first
    third = -2 * first * (first - 2 * t * t)
    inner, inner1, inner2 = t @ v + c, first @ (v * w), second @ (v * w * w)
    residual = 2 * inner - 2 * slope[:, 0] * inner1 - edge[:, 0] * inner2 - source(x[:, 0])
    error = 2 * residual[:, None]
    by_angle = error * v * (2 * first - 2 * slope * w * second - edge * w * w * third)
    by_w = (by_angle * x + error * v * (-2 * slope * first - 2 * edge * w * second)).sum(axis=0)
    by_v = (error * (2 * t - 2 * slope * w * first - edge * w * w * second)).sum(axis=0)
    return [by_w, by_angle.sum(axis=0), by_v, 2 * error.sum(axis=0)], (residual**2).sum()


class Adam:
    """The optimizer, with a state on every rank, which takes the same steps everywhere."""

    def __init__(self, network: list[Any], rate: float) -> None:
        self.rate, self.step = rate, 0
        self.means = [np.zeros_like(array) for array in network]
        self.squares = [np.zeros_like(array) for array in network]

    def update(self, network: list[Any], gradients: list[Any]) -> None:
        """Change the network in place."""
        self.step += 1
        for array, mean, square, gradient in zip(network, self.means, self.squares, gradients, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient * gradient - square)
            scaled = mean / (1 - 0.9**self.step), square / (1 - 0.999**self.step)
            array -= self.rate * scaled[0] / (np.sqrt(scaled[1]) + 1e-8)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Solve a differential equation with a network.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=8, help="at least the number of ranks")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", help="save in this folder after the last step, and go on from there")
    return parser.parse_args()


def main() -> None:
    """Train, and compare with the solution."""
    options = parse()
    strategy = mpidist.MultiWorkerMirroredStrategy(replicas=options.replicas)
    network = make_network(options.seed)
    adam = Adam(network, options.learning_rate)
    with strategy.scope():
        checkpoint = Checkpoint(network=network, means=adam.means, squares=adam.squares, step=0)
    if options.checkpoints:
        manager = CheckpointManager(checkpoint, options.checkpoints)
        manager.restore_or_initialize()
        adam.step = checkpoint.step
    count = strategy.num_replicas_in_sync * POINTS
    while adam.step < options.steps:
        sums = strategy.run(residual_gradients, args=(network, options.seed, adam.step))
        gradients, loss = strategy.reduce("sum", sums)
        adam.update(network, [gradient / count for gradient in gradients])
        if strategy.is_chief and adam.step % 500 == 0:
            print(f"step {adam.step} of {options.steps}: mean squared residual {loss / count:.3e}", flush=True)
    if options.checkpoints:
        checkpoint.step = adam.step
        manager.save(adam.step)
    x = np.linspace(0, 1, 1001)
    exact = np.sin(np.pi * x)
    error = np.linalg.norm(solution(network, x) - exact) / np.linalg.norm(exact)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in network)).hexdigest()[:16]
    if strategy.is_chief:
        print(f"relative error {error:.1e}, {count // POINTS} replicas on {strategy.topology}")
        print(f"weights {digest}")
    strategy.close()


if __name__ == "__main__":
    main()
