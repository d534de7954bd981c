"""Tests with PyTorch and JAX, which `make test-all` runs in an environment of their own, `.venv-tensors`."""

from importlib.util import find_spec

import pytest
from support.process_groups import open_process_group

# Where a package is missing, its tests are not there either: the other environments are without it on purpose.
collect_ignore_glob = [
    *(["test_torch_*.py"] if find_spec("torch") is None else []),
    *(["test_jax_*.py"] if not all(map(find_spec, ("jax", "flax", "optax"))) else []),
]


@pytest.fixture
def ranks(comm, tmp_path):
    """Open a process group of torch over all ranks, and give this rank and their number."""
    with open_process_group(comm, tmp_path):
        yield comm.rank, comm.size
