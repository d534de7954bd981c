"""Guess hidden pixels of scikit-learn's handwritten digits, with the factors of the pixels on parameter servers.

    mpidist run -n 4 hidden_pixels.py             two workers, and two servers with half of the factors each
    mpidist run -n 6 hidden_pixels.py --servers 1 --plot five_workers.png

A fifth of all pixels is hidden. An image is a mixture of 12 patterns, the factors of the pixels. At each step a worker
reads the factors, finds the mixtures of some images from the pixels that it may see, and pushes the gradient of their
errors; the server takes the step. One step in five takes longer, on each worker at times of its own, as where others
use the machine. Training is done in three ways, which differ in what that costs.
"""

import argparse
import os
import time

import numpy as np
from sklearn.datasets import load_digits

import mpidist
from mpidist import ParameterServerStrategy, partitioners, server_rules

parser = argparse.ArgumentParser(description="Guess hidden pixels of handwritten digits, with parameter servers.")
parser.add_argument("--servers", type=int, default=os.environ.get("NUM_PS"), help="of all ranks; slurm/roles.sbatch")
parser.add_argument("--steps", type=int, default=600, help="of all workers together, for each way")
parser.add_argument("--pause", type=float, default=0.02, help="seconds that one step in five takes longer")
parser.add_argument("--plot", metavar="FILE", help="draw the errors over time and over steps")
options = parser.parse_args()
for name in ("steps", "servers"):
    if getattr(options, name) is not None and getattr(options, name) < 1:
        parser.error(f"--{name} must be 1 or more, got {getattr(options, name)}")
ways = {"in step": 0, "at most 8 steps ahead": 8, "free": None}  # and their staleness
num_ranks = mpidist.cluster_resolver.MPIClusterResolver().num_tasks
num_servers = min(2, max(1, num_ranks - 1)) if options.servers is None else options.servers
pixels = load_digits(return_X_y=True)[0] / 16  # [images, pixels]
seen = (np.random.default_rng(0).random(pixels.shape) >= 0.2).astype(float)
pixels -= (pixels * seen).sum(axis=0) / np.maximum(1, seen.sum(axis=0))


def fit(factors, pixels, seen):
    """Fit how much of each pattern is in each image to the pixels that are seen; return that, and all errors."""
    normal = np.einsum("ip,pf,pg->ifg", seen, factors, factors, optimize=True) + 0.3 * np.eye(12)
    mixture = np.linalg.solve(normal, ((pixels * seen) @ factors)[..., None])[..., 0]
    return mixture, mixture @ factors.T - pixels


def train(strategy):
    """Take steps until all workers have taken enough; return (seconds, steps, factors) at points on the way."""
    with strategy.scope():
        start_values = np.random.default_rng(0).normal(0, 0.1, (64, 12))
        factors = mpidist.Variable(start_values, name="factors")
        all_steps = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA", name="steps of all workers")
    random, rule = np.random.default_rng([0, 1 + strategy.rank]), server_rules.SGD(0.2)
    start, points = time.perf_counter(), []
    while True:
        current, steps = strategy.read([factors, all_steps])
        if strategy.is_chief and steps >= len(points) * options.steps / 25:
            points.append((time.perf_counter() - start, int(steps), current))
        if steps >= options.steps:
            return points
        rows = random.integers(0, len(pixels), 32)
        mixture, errors = fit(current, pixels[rows], seen[rows])
        strategy.push(factors, (errors * seen[rows]).T @ mixture / 32, rule)
        all_steps.assign_add(1)
        strategy.step_done()
        if random.random() < 0.2:
            time.sleep(options.pause)


def report(curves):
    """Print a table, and draw the plot."""
    print(f"{'workers are':<22} {'staleness':>9} {'steps':>6} {'seconds':>8} {'to 0.205':>9} {'error':>7}")
    for name, curve in curves.items():
        seconds, steps, error = curve[-1]
        reached = next((f"{at:.2f}" for at, _, its in curve if its <= 0.205), "never")
        print(f"{name:<22} {ways[name]!s:>9} {steps:>6} {seconds:>8.2f} {reached:>9} {error:>7.4f}")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        for place, axes in enumerate(figure.subplots(1, 2, sharey=True)):
            for name, curve in curves.items():
                axes.plot([point[place] for point in curve], [error for *_, error in curve], marker=".", label=name)
            axes.set(xlabel=("seconds", "steps of all workers")[place], ylabel="error of hidden pixels (RMSE)")
            axes.legend(frameon=False)
        figure.savefig(options.plot, dpi=80)
        print(f"the errors over time and over steps: {options.plot}")


curves = {}
for name, staleness in ways.items():
    partitioner = partitioners.FixedShardsPartitioner(num_servers)
    with ParameterServerStrategy(None, partitioner, num_ps=num_servers, staleness=staleness) as strategy:
        if strategy.is_ps:
            strategy.serve()
        elif points := train(strategy):
            hidden = [fit(factors, pixels, seen)[1][seen == 0] for *_, factors in points]
            errors = [float(np.sqrt((error**2).mean())) for error in hidden]
            curves[name] = [(*point[:2], error) for point, error in zip(points, errors, strict=True)]
            title = f"workers: {strategy.size}, servers: {strategy.num_ps}"
if curves:
    print(f"{title}; {int((seen == 0).sum())} hidden pixels")
    report(curves)
