"""Guess hidden pixels of scikit-learn's handwritten digits, with the factors of the pixels on parameter servers.

    python hidden_pixels.py                       one rank, worker and server in one
    mpiexec -n 4 python hidden_pixels.py          two workers, and two servers with half of the factors each
    mpiexec -n 6 python hidden_pixels.py --servers 1 --plot five_workers.png

A fifth of all pixels is hidden. An image is a mixture of 12 patterns, the factors of the pixels. At each step a worker
reads the factors, finds the mixtures of some images from the pixels that it may see, and pushes the gradient of their
errors; the server takes the step. Training is done three times: in step, in almost the same step, and freely.

One step in five takes longer, on each worker at times of its own, as where others use the machine, the network or the
disks. What that costs is what the three ways differ in.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import mpidist
from mpidist import ParameterServerStrategy, partitioners, server_rules

FACTORS, RIDGE, BATCH, POINTS = 12, 0.3, 32, 25  # POINTS: of a curve of the plot
WAYS = {"in step": 0, "at most 8 steps ahead": 8, "free": None}


class Images(NamedTuple):
    """Images less the mean of the pixels that are not hidden, and 1 for each pixel that is not hidden, else 0."""

    pixels: Any  # [images, pixels]
    seen: Any  # [images, pixels]


class Point(NamedTuple):
    """The factors, as the chief has read them."""

    seconds: float
    steps: int  # of all workers together
    factors: Any


def load_images(seed: int) -> Images:
    """Hide a fifth of all pixels; the same on every rank."""
    pixels = load_digits(return_X_y=True)[0] / 16
    seen = (np.random.default_rng(seed).random(pixels.shape) >= 0.2).astype(float)
    return Images(pixels - (pixels * seen).sum(axis=0) / np.maximum(1, seen.sum(axis=0)), seen)


def mixtures(factors: Any, images: Images) -> Any:
    """Fit how much of each pattern is in each image to the pixels that are seen."""
    normal = np.einsum("ip,pf,pg->ifg", images.seen, factors, factors, optimize=True) + RIDGE * np.eye(FACTORS)
    return np.linalg.solve(normal, ((images.pixels * images.seen) @ factors)[..., None])[..., 0]


def gradient(factors: Any, images: Images) -> Any:
    """Return the gradient of half of the squared errors by the factors, the mean over images."""
    mixture = mixtures(factors, images)
    errors = (mixture @ factors.T - images.pixels) * images.seen
    return errors.T @ mixture / len(mixture)


def held_out_error(factors: Any, images: Images) -> float:
    """Return the root of the mean squared error of the pixels that are hidden."""
    errors = mixtures(factors, images) @ factors.T - images.pixels
    return float(np.sqrt((errors[images.seen == 0] ** 2).mean()))


def train(strategy: ParameterServerStrategy, images: Images, options: argparse.Namespace) -> list[Point]:
    """Take steps until all workers together have taken enough, and return points on the way. On workers."""
    worker = strategy.rank
    start_values = np.random.default_rng(options.seed).normal(0, 0.1, (images.pixels.shape[1], FACTORS))
    with strategy.scope():
        factors = mpidist.Variable(start_values, name="factors")
        all_steps = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA", name="steps of all workers")
    chance = np.random.default_rng([options.seed, 1 + worker])
    rule = server_rules.SGD(options.learning_rate)
    start, points = time.perf_counter(), []
    while True:
        current, steps = strategy.read([factors, all_steps])
        if strategy.is_chief and (steps >= len(points) * options.steps / POINTS):
            points.append(Point(time.perf_counter() - start, int(steps), current))
        if steps >= options.steps:
            return points
        rows = chance.integers(0, len(images.pixels), BATCH)
        strategy.push(factors, gradient(current, Images(images.pixels[rows], images.seen[rows])), rule)
        all_steps.assign_add(1)
        strategy.step_done()
        if chance.random() < 0.2:
            time.sleep(options.pause)


def plot(curves: dict[str, list[tuple[float, int, float]]], title: str, path: Path) -> None:
    """Draw the error over time, and over steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path}: matplotlib is not installed")
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, over_steps = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        seconds, steps, errors = zip(*curve, strict=True)
        over_time.plot(seconds, errors, marker=".", label=name)
        over_steps.plot(steps, errors, marker=".", label=name)
    over_time.set(xlabel="seconds", ylabel="error of hidden pixels (RMSE)")
    over_steps.set(xlabel="steps of all workers")
    for axes in (over_time, over_steps):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    print(f"the errors over time and over steps: {path}")


def report(found: dict[str, list[Point]], images: Images, options: argparse.Namespace, title: str) -> None:
    """Print a table, and draw the plot. On the chief."""
    curves = {
        name: [(point.seconds, point.steps, held_out_error(point.factors, images)) for point in points]
        for name, points in found.items()
    }
    print(f"{title}; {(images.seen == 0).sum()} hidden pixels")
    print(f"{'workers are':<22} {'staleness':>9} {'steps':>6} {'seconds':>8} {'to 0.205':>9} {'error':>7}")
    for name, curve in curves.items():
        seconds, steps, error = curve[-1]
        reached = next((f"{at:.2f}" for at, _, its in curve if its <= 0.205), "never")
        print(f"{name:<22} {WAYS[name]!s:>9} {steps:>6} {seconds:>8.2f} {reached:>9} {error:>7.4f}")
    plot(curves, title, options.plot)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Guess hidden pixels of handwritten digits, with parameter servers.")
    parser.add_argument(
        "--servers",
        type=int,
        default=os.environ.get("NUM_PS"),  # slurm/roles.sbatch sets it
        help="of all ranks; by default NUM_PS, else 2, or 1 of two ranks",
    )
    parser.add_argument("--steps", type=int, default=600, help="of all workers together, for each way")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that one step in five takes longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("hidden_pixels.png"))
    options = parser.parse_args()
    for name in ("steps", "servers"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name} must be 1 or more, got {number}")
    return options


def main() -> None:
    """Train in each way, and compare them."""
    options = parse()
    num_ranks = mpidist.cluster_resolver.MPIClusterResolver().num_tasks
    num_servers = options.servers or min(2, max(1, num_ranks - 1))
    partitioner = partitioners.FixedShardsPartitioner(num_servers)
    images, found, title = load_images(options.seed), {}, ""
    for name, staleness in WAYS.items():
        with ParameterServerStrategy(None, partitioner, num_ps=num_servers, staleness=staleness) as strategy:
            if strategy.is_ps:
                strategy.serve()
                continue
            found[name] = train(strategy, images, options)
            title = f"workers: {strategy.size}, servers: {strategy.num_ps}"
    if found and strategy.is_chief:
        report(found, images, options, title)


if __name__ == "__main__":
    main()
