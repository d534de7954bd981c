"""Guess hidden pixels of scikit-learn's handwritten digits, with the factors of the pixels on parameter servers.

    mpidist run -n 4 hidden_pixels.py --plot errors.png     two workers, and two servers with half of the factors each

An image is a mixture of 12 patterns, the factors of the pixels. At each step a worker reads the factors, fits the
mixtures of some images to the pixels that it may see, and pushes the gradient of their errors; the server takes the
step. One step in five takes longer: what that costs differs between three ways of training.
"""

import argparse
import os
import time
from importlib import import_module

import numpy as np
from sklearn.datasets import load_digits

import mpidist

num_servers = os.environ.get("NUM_PS", min(2, (mpidist.cluster_resolver.MPIClusterResolver().num_tasks + 1) // 2))
parser = argparse.ArgumentParser(description="Guess hidden pixels of handwritten digits, with parameter servers.")
parser.add_argument("--servers", type=int, default=num_servers, help="of all ranks; by default two, or NUM_PS")
parser.add_argument("--steps", type=int, default=600, help="of all workers together, for each way")
parser.add_argument("--pause", type=float, default=0.02, help="seconds that one step in five takes longer")
parser.add_argument("--plot", metavar="FILE", help="draw the errors over time and over steps")
options = parser.parse_args()
for name in ("steps", "servers"):
    if getattr(options, name) < 1:
        parser.error(f"--{name} must be 1 or more, got {getattr(options, name)}")
pixels = load_digits(return_X_y=True)[0] / 16  # [images, pixels]
seen = np.random.default_rng(0).random(pixels.shape) >= 0.2
pixels -= pixels.mean(axis=0, where=seen)


def fit(factors, pixels, seen):
    """Fit how much of each pattern is in each image to the pixels that are seen; return that, and all errors."""
    normal = np.einsum("ip,pf,pg->ifg", seen, factors, factors, optimize=True) + 0.3 * np.eye(12)
    mixture = np.linalg.solve(normal, ((pixels * seen) @ factors)[..., None])[..., 0]
    return mixture, mixture @ factors.T - pixels


shards = mpidist.partitioners.FixedShardsPartitioner(options.servers)
servers, curves = {"num_ps": options.servers, "variable_partitioner": shards}, {}
for name, staleness in {"in step": 0, "at most 8 steps ahead": 8, "free": None}.items():
    with mpidist.ParameterServerStrategy(**servers, staleness=staleness) as strategy, strategy.scope():
        if strategy.is_ps:
            strategy.serve()
            continue
        factors = mpidist.Variable(np.random.default_rng(0).normal(0, 0.1, (64, 12)), name="factors")
        all_steps = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA", name="steps of all workers")
        random, start, points = np.random.default_rng([0, 1 + strategy.rank]), time.perf_counter(), []
        while True:
            current, steps = strategy.read([factors, all_steps])
            if strategy.is_chief and steps >= len(points) * options.steps / 25:
                points.append((time.perf_counter() - start, int(steps), current))
            if steps >= options.steps:
                break
            rows = random.integers(0, len(pixels), 32)
            mixture, errors = fit(current, pixels[rows], seen[rows])
            strategy.push(factors, (errors * seen[rows]).T @ mixture / 32, mpidist.server_rules.SGD(0.2))
            all_steps.assign_add(1)
            strategy.step_done()
            time.sleep(random.choice([options.pause, 0, 0, 0, 0]))
        if strategy.is_chief:
            if not curves:
                print(f"workers: {strategy.size}, servers: {strategy.num_ps}; {(~seen).sum()} hidden pixels")
                print(f"{'workers are':<22} {'staleness':>9} {'steps':>6} {'seconds':>8} {'to 0.205':>9} {'error':>7}")
            curves[name] = curve = [(*at, np.sqrt(np.mean(fit(it, pixels, seen)[1][~seen] ** 2))) for *at, it in points]
            reached = next((f"{at:.2f}" for at, _, error in curve if error <= 0.205), "never")
            seconds, steps, error = curve[-1]
            print(f"{name:<22} {staleness!s:>9} {steps:>6} {seconds:>8.2f} {reached:>9} {error:>7.4f}")
if options.plot and curves:
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 4), layout="constrained")
    for place, label in enumerate(("seconds", "steps of all workers")):
        axes = figure.add_subplot(1, 2, 1 + place, xlabel=label, ylabel="error of hidden pixels (RMSE)")
        for name, curve in curves.items():
            axes.plot([point[place] for point in curve], [error for *_, error in curve], marker=".", label=name)
        axes.legend(frameon=False)
    figure.savefig(options.plot, dpi=80)
    print(f"the errors over time and over steps: {options.plot}")
