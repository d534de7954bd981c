"""Train a small network on scikit-learn's handwritten digits: the same weights, bit for bit, on any number of ranks.

    python digits.py
    mpidist run -n 4 digits.py --device gpu

Every rank holds the whole network, and carries some of the 8 replicas. At each step a replica computes the gradients of
its part of the batch, they are summed over all replicas, and every rank takes the same step.
"""

import argparse
import hashlib
import time
from importlib import import_module

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpidist

parser = argparse.ArgumentParser(description="Train on handwritten digits, on any number of ranks.")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
options = parser.parse_args()
if options.epochs < 1:
    parser.error(f"--epochs must be 1 or more, got {options.epochs}")
xp = import_module("cupy" if options.device == "gpu" else "numpy")


def forward(images):
    """Return the hidden layer and the probability of each class."""
    w1, b1, w2, b2 = (variable.local_value() for variable in network)
    hidden = xp.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    powers = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def backward(images, labels):
    """Return the gradients of this replica's images, summed and not averaged, their summed loss, and their number."""
    images, labels = xp.asarray(images), xp.asarray(labels)
    hidden, probability = forward(images)
    of_label = xp.arange(len(labels)), labels
    loss = -xp.log(probability[of_label] + 1e-12).sum()
    error = probability.copy()
    error[of_label] -= 1
    back = (error @ network[2].local_value().T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)], float(loss), len(labels)


data, target = load_digits(return_X_y=True)
split = train_test_split((data / 16).astype(np.float32), target, test_size=0.2, stratify=target, random_state=0)
images, test_images, labels, test_labels = split
random = np.random.default_rng(0)
values = [random.normal(0, 32**-0.5, (64, 128)), np.zeros(128), random.normal(0, 64**-0.5, (128, 10)), np.zeros(10)]
start = time.perf_counter()
with mpidist.MultiWorkerMirroredStrategy(replicas=8) as strategy:
    with strategy.scope():
        network = [mpidist.Variable(xp.asarray(value), dtype=np.float32) for value in values]
    velocity = [xp.zeros(variable.shape, np.float32) for variable in network]
    dataset = strategy.experimental_distribute_dataset(mpidist.Batches((images, labels), 64, seed=0))
    for epoch in range(1, options.epochs + 1):
        total_loss, total_count = 0.0, 0
        for batch in dataset:
            of_replicas = strategy.run(backward, args=batch)
            # The count is summed, too: replicas with fewer images weigh less, with none nothing.
            gradients, loss, count = strategy.reduce("sum", of_replicas)
            for variable, speed, gradient in zip(network, velocity, gradients, strict=True):
                speed *= 0.9
                speed -= 0.1 * gradient / count
                variable.assign_add(speed)
            total_loss, total_count = total_loss + loss, total_count + count
        if strategy.is_chief and (epoch % 10 == 0 or epoch == options.epochs):
            print(f"epoch {epoch} of {options.epochs}: loss {total_loss / total_count:.4f}", flush=True)
    strategy.check_equal(network, what="the network")
    correct = float((forward(xp.asarray(test_images))[1].argmax(axis=1) == xp.asarray(test_labels)).mean())
    digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in network)).hexdigest()[:16]
    if strategy.is_chief:
        print(f"{correct:.1%} of 360 held-out digits, {time.perf_counter() - start:.1f} s, {strategy.topology}")
        print(f"weights {digest} of {strategy.num_replicas_in_sync} replicas, the same on any number of ranks")
