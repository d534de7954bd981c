"""Solve -u'' = f on [0, 1] with a network that is trained on the equation alone, with random numbers on each replica.

    python physics_informed.py                                  the same weights on any number of ranks
    mpidist run -n 4 physics_informed.py --steps 150 --checkpoints kept
    mpidist run -n 3 physics_informed.py --steps 300 --checkpoints kept

At each step every replica draws points of its own, and sums the gradients of the equation's residual there; sums of
replicas are added in one order on any number of ranks.
"""

import argparse
import hashlib

import numpy as np

import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

UNITS, POINTS, REPLICAS, RATE = 32, 64, 8, 0.01  # hidden units; points of each replica at a step

parser = argparse.ArgumentParser(description="Solve a differential equation with a network.")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--checkpoints", help="save in this folder after the last step, and go on from there")
options = parser.parse_args()


def solution(x):
    """Return u(x) = x (1 - x) (v . tanh(w x + b) + c) at some points."""
    w, b, v, c = network
    return x * (1 - x) * (np.tanh(np.multiply.outer(x, w) + b) @ v + c)


def residual_gradients(step):
    """Return the gradients of the summed squared residuals -u'' - f at this replica's points, and that sum."""
    x = mpidist.get_replica_context().rng(0, step).random(POINTS)[:, None]
    w, b, v, c = network
    edge, slope = x * (1 - x), 1 - 2 * x  # vanishes at both ends, and its derivative; the second one is -2
    t = np.tanh(x * w + b)
    first = 1 - t * t  # derivatives of tanh
    second = -2 * t * first
    third = -2 * first * (first - 2 * t * t)
    inner, inner1, inner2 = t @ v + c, first @ (v * w), second @ (v * w * w)
    source = np.pi**2 * np.sin(np.pi * x[:, 0])  # f, for which the solution is sin(pi x)
    residual = 2 * inner - 2 * slope[:, 0] * inner1 - edge[:, 0] * inner2 - source
    error = 2 * residual[:, None]
    by_angle = error * v * (2 * first - 2 * slope * w * second - edge * w * w * third)
    by_w = (by_angle * x + error * v * (-2 * slope * first - 2 * edge * w * second)).sum(axis=0)
    by_v = (error * (2 * t - 2 * slope * w * first - edge * w * w * second)).sum(axis=0)
    return [by_w, by_angle.sum(axis=0), by_v, 2 * error.sum(axis=0)], (residual**2).sum()


random = np.random.default_rng(0)
network = [random.normal(0, 3, UNITS), random.normal(0, 3, UNITS), random.normal(0, 0.2, UNITS), np.zeros(1)]
means, squares = ([np.zeros_like(array) for array in network] for _ in range(2))  # of Adam
with mpidist.MultiWorkerMirroredStrategy(replicas=REPLICAS) as strategy:
    with strategy.scope():
        checkpoint = Checkpoint(network=network, means=means, squares=squares, step=0)
    if options.checkpoints:
        manager = CheckpointManager(checkpoint, options.checkpoints)
        manager.restore_or_initialize()
    while checkpoint.step < options.steps:
        sums = strategy.run(residual_gradients, args=(checkpoint.step,))
        gradients, loss = strategy.reduce("sum", sums)
        checkpoint.step += 1
        for array, mean, square, gradient in zip(network, means, squares, gradients, strict=True):
            gradient = gradient / (REPLICAS * POINTS)
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient * gradient - square)
            scaled = mean / (1 - 0.9**checkpoint.step), square / (1 - 0.999**checkpoint.step)
            array -= RATE * scaled[0] / (np.sqrt(scaled[1]) + 1e-8)
        if strategy.is_chief and checkpoint.step % 500 == 0:
            print(f"step {checkpoint.step}: mean squared residual {loss / (REPLICAS * POINTS):.3e}", flush=True)
    if options.checkpoints:
        manager.save(checkpoint.step)
    exact = np.sin(np.pi * np.linspace(0, 1, 1001))
    error = np.linalg.norm(solution(np.linspace(0, 1, 1001)) - exact) / np.linalg.norm(exact)
    if strategy.is_chief:
        digest = hashlib.sha256(b"".join(array.tobytes() for array in network)).hexdigest()[:16]
        print(f"relative error {error:.1e}, {REPLICAS} replicas on {strategy.topology}")
        print(f"weights {digest}")
