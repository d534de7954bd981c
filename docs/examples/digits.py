"""Train a small network on scikit-learn's handwritten digits, on any number of ranks.

    python digits.py                      one rank, no launcher
    mpiexec -n 4 python digits.py         four ranks, the same weights, bit for bit
    mpiexec -n 4 python digits.py --device gpu

Every rank holds the whole network, and carries some of the replicas, whose number is chosen. At each step a replica
computes the gradients of its part of the batch, the gradients are summed over all replicas in an order that does not
depend on the number of ranks, and every rank takes the same step.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpidist

HIDDEN, CLASSES = 128, 10


def make_network(xp: Any, seed: int, num_inputs: int) -> list[mpidist.Variable]:
    """Make the weights and biases of two layers, and a velocity for each. Collective."""
    random = np.random.default_rng(seed)
    sizes = [(num_inputs, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    values = [random.normal(0, (2 / size[0]) ** 0.5, size) if len(size) > 1 else np.zeros(size) for size in sizes]
    return [mpidist.Variable(xp.asarray(value), dtype=np.float32) for value in values]


def forward(xp: Any, weights: list[Any], images: Any) -> tuple[Any, Any]:
    """Return the hidden layer and the probability of each class."""
    w1, b1, w2, b2 = weights
    hidden = xp.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    powers = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def backward(xp: Any, weights: list[Any], images: Any, labels: Any) -> tuple[list[Any], float, int]:
    """Return the gradients of this replica's images, summed and not averaged, their summed loss, and their number."""
    images, labels = xp.asarray(images), xp.asarray(labels)
    hidden, probability = forward(xp, weights, images)
    rows = xp.arange(len(labels))
    loss = -xp.log(probability[rows, labels] + 1e-12).sum()
    error = probability.copy()
    error[rows, labels] -= 1
    back = (error @ weights[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)], float(loss), len(labels)


def train_step(
    strategy: mpidist.Strategy, xp: Any, network: list[mpidist.Variable], velocity: list[Any], batch: Any, rate: float
) -> tuple[float, int]:
    """Take one step, the same on every rank, and return the loss and the number of images of the whole batch."""
    weights = [variable.local_value() for variable in network]
    of_replicas = strategy.run(backward, args=(xp, weights, *batch))
    # Sums over all replicas, and the count with them: replicas with fewer images weigh less, with none nothing.
    gradients, loss, count = strategy.reduce("sum", of_replicas)
    for variable, speed, gradient in zip(network, velocity, gradients, strict=True):
        speed *= 0.9
        speed -= rate * gradient / count
        variable.assign_add(speed)
    return loss, count


def digest(network: list[mpidist.Variable]) -> Any:
    """Return the first bytes of a hash of all weights of this rank."""
    content = b"".join(variable.numpy().tobytes() for variable in network)
    return np.frombuffer(hashlib.sha256(content).digest()[:8], np.uint8)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks together")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=8, help="at least the number of ranks")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {options.epochs}")
    return options


def main() -> None:
    """Train, test, and compare the weights of all ranks."""
    options = parse()
    if options.device == "gpu":
        import cupy as xp
    else:
        xp = np
    data, target = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        (data / 16).astype(np.float32), target, test_size=0.2, stratify=target, random_state=options.seed
    )
    start = time.perf_counter()
    strategy = mpidist.MultiWorkerMirroredStrategy(replicas=options.replicas)
    with strategy.scope():
        network = make_network(xp, options.seed, images.shape[1])
        velocity = [xp.zeros(variable.shape, np.float32) for variable in network]
        batches = mpidist.Batches((images, labels), options.batch_size, seed=options.seed)
        dataset = strategy.experimental_distribute_dataset(batches)
        for epoch in range(1, options.epochs + 1):
            loss, count = 0.0, 0
            for batch in dataset:
                step = train_step(strategy, xp, network, velocity, batch, options.learning_rate)
                loss, count = loss + step[0], count + step[1]
            if strategy.is_chief and (epoch % 10 == 0 or epoch == options.epochs):
                print(f"epoch {epoch} of {options.epochs}: loss {loss / count:.4f}", flush=True)
    _, probability = forward(xp, [variable.local_value() for variable in network], xp.asarray(test_images))
    correct = float((probability.argmax(axis=1) == xp.asarray(test_labels)).mean())
    own = digest(network)
    if strategy.is_chief:
        seconds = time.perf_counter() - start
        print(f"{correct:.1%} of {len(test_labels)} held-out digits, {seconds:.1f} s, {strategy.topology}")
    everyone = strategy.experimental_distribute_values_from_function(lambda _: own)
    if (strategy.reduce("min", everyone) != strategy.reduce("max", everyone)).any():
        raise SystemExit(f"the ranks hold different weights; those of rank {strategy.rank} are {own}")
    if strategy.is_chief:
        print(
            f"weights {bytes(own).hex()} of {strategy.num_replicas_in_sync} replicas, the same on any number of ranks"
        )
    strategy.close()


if __name__ == "__main__":
    main()
