"""The cluster of all tests in this folder."""

import pytest
from slurm.emulated_cluster import EmulatedCluster


@pytest.fixture(scope="session")
def cluster():
    """Three nodes under Slurm."""
    lack = EmulatedCluster.missing()
    if lack:
        pytest.skip(f"needs a mount namespace and others, and Slurm in them: {lack}")
    with EmulatedCluster() as started:
        yield started
