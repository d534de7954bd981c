"""Hosts out of namespaces, as the benchmarks build them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from hosts import HEAD, Hosts, HostsError, bits_per_second  # noqa: E402

__all__ = ["BENCHMARKS", "HEAD", "Hosts", "HostsError", "bits_per_second", "need_hosts"]


def need_hosts() -> None:
    lack = Hosts.missing()
    if lack:
        pytest.skip(f"needs a mount namespace and others, and links between them: {lack}")
