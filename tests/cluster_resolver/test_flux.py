"""What FluxClusterResolver reads: the environment, and what `flux job taskmap --to=hosts` prints. No MPI needed."""

import pytest

from mpidist.cluster_resolver import FluxClusterResolver
from mpidist.errors import TopologyError

pytestmark = pytest.mark.no_mpi


def resolver(folder, printed, status=0, **variables):
    """Return a resolver for which the command `flux` prints this."""
    (folder / "flux").write_text(f"#!/bin/sh\necho '{printed}' | tee /dev/stderr\nexit {status}\n")
    (folder / "flux").chmod(0o755)
    return FluxClusterResolver(environ={"PATH": f"{folder}:/usr/bin:/bin", **variables})


def test_flux_resolver_in_a_job_gives_a_worker_for_each_task(tmp_path):
    own = resolver(tmp_path, "n1: 0,2\nn2: 1,3-4", FLUX_JOB_ID="f2B", FLUX_TASK_RANK="4", CUDA_VISIBLE_DEVICES="1")
    assert own.cluster_spec() == {"worker": ["n1:8888", "n2:8888", "n1:8889", "n2:8889", "n2:8890"]}
    assert (own.task_type, own.task_id, own.rank, own.master()) == ("worker", 4, 4, "n2:8890")
    assert own.num_accelerators() == {"GPU": 1}
    own.check(size=5, rank=4)
    with pytest.raises(TopologyError, match="has 5 tasks"):
        own.check(size=8, rank=4)


def test_flux_resolver_without_a_job_raises(tmp_path):
    with pytest.raises(TopologyError, match="in no job of Flux"):
        resolver(tmp_path, "").cluster_spec()
    with pytest.raises(TopologyError, match="taskmap --to=hosts f2B` failed: job not found"):
        resolver(tmp_path, "job not found", 1, FLUX_JOB_ID="f2B").cluster_spec()
    assert resolver(tmp_path, "").task_id is None
