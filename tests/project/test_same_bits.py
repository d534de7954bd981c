"""The examples that choose a number of replicas give the same weights, bit for bit, on any number of ranks."""

import re
import sys
from pathlib import Path

import pytest
from jobs.failing import ran
from jobs.faults import environment
from mpi_session.launch import HANG_SECONDS, Launcher

import mpidist

pytestmark = [pytest.mark.no_mpi, pytest.mark.core, pytest.mark.timeout(5 * HANG_SECONDS)]

EXAMPLES = Path(mpidist.__file__).parents[1] / "docs" / "examples"
RANKS = (1, 2, 3, 4, 8)


def weights(example, ranks, *arguments, nodes=""):
    """Run an example, and return the digest of its weights."""
    command = [*Launcher.find(None).command, "-n", str(ranks), sys.executable, str(EXAMPLES / example)]
    variables = {"MPIDIST_PRETEND_NODES": nodes} if nodes else {}
    done = ran([*command, *map(str, arguments)], env={**environment(), **variables})
    found = re.search(r"^weights ([0-9a-f]{16})", done.stdout, re.MULTILINE)
    assert found is not None, (done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return found[1]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [("digits.py", ["--epochs", 14]), ("physics_informed.py", ["--steps", 300])],  # some 300 steps of each
)
def test_weights_are_the_same_on_any_number_of_ranks(example, arguments):
    digests = {ranks: weights(example, ranks, *arguments) for ranks in RANKS}
    digests[-4] = weights(example, 4, *arguments, nodes="0,0,1,1")
    digests[-3] = weights(example, 3, *arguments, nodes="0,1,0")
    assert len(set(digests.values())) == 1, digests


def test_training_goes_on_with_another_number_of_ranks(tmp_path):
    """Stopped on 4 ranks, it goes on with 3 as if it had never stopped."""
    state = tmp_path / "kept"
    weights("physics_informed.py", 4, "--steps", 150, "--checkpoints", state)
    resumed = weights("physics_informed.py", 3, "--steps", 300, "--checkpoints", state)
    assert resumed == weights("physics_informed.py", 1, "--steps", 300)
    assert resumed != weights("physics_informed.py", 1, "--steps", 299)
