"""Environments in, addresses and numbers out."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from mpidist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from mpidist.cluster_resolver.resolver import OwnTask
from mpidist.cluster_resolver.roles import id_in_cluster, validate_roles
from mpidist.errors import TopologyError

pytestmark = pytest.mark.no_mpi


# ClusterSpec


def test_spec_gives_back_what_it_was_made_of() -> None:
    """T227, the parts of a spec."""
    spec = ClusterSpec({"ps": ["ps0:1"], "worker": ("w0:1", "w1:1")})
    assert spec.as_dict() == {"ps": ["ps0:1"], "worker": ["w0:1", "w1:1"]}
    assert spec.jobs == ["ps", "worker"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "w1:1"
    assert spec.job_tasks("worker") == ["w0:1", "w1:1"]


def test_spec_equals_its_copy_and_its_dict() -> None:
    """T227, comparison."""
    spec = ClusterSpec({"worker": ["w0:1"]})
    assert spec == ClusterSpec(spec)
    assert spec == {"worker": ["w0:1"]}
    assert spec == {"worker": ("w0:1",)}
    assert spec != ClusterSpec({"worker": ["w1:1"]})
    assert spec != "worker"


def test_spec_cannot_be_changed_through_what_it_gives_or_got() -> None:
    """T227, ownership."""
    addresses = ["w0:1"]
    spec = ClusterSpec({"worker": addresses})
    addresses.append("w1:1")
    spec.as_dict()["worker"].append("w2:1")
    spec.job_tasks("worker").append("w3:1")
    spec.jobs.append("ps")
    assert spec == {"worker": ["w0:1"]}


def test_spec_without_jobs_is_false() -> None:
    """1.4.11: a TF_CONFIG without a cluster gives an empty spec."""
    assert not ClusterSpec({})
    assert ClusterSpec({"worker": ["w0:1"]})


def test_spec_of_some_tasks_knows_those() -> None:
    """As TensorFlow's: without gaps it is a list."""
    spec = ClusterSpec({"worker": {3: "w3:1", 1: "w1:1"}, "ps": {1: "p1:1", "0": "p0:1"}, "chief": {}})
    assert spec.as_dict() == {"worker": {1: "w1:1", 3: "w3:1"}, "ps": ["p0:1", "p1:1"], "chief": []}
    assert spec == spec.as_dict() == ClusterSpec(spec)
    assert spec != {"worker": ["w1:1", "w3:1"], "ps": ["p0:1", "p1:1"], "chief": []}
    assert spec.job_tasks("worker") == [None, "w1:1", None, "w3:1"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [1, 3])
    assert spec.task_address("worker", 3) == "w3:1"
    with pytest.raises(ValueError, match=r"no task 2 in job 'worker'; its indices are \[1, 3\]"):
        spec.task_address("worker", 2)
    assert [spec.is_sparse(job) for job in spec.jobs] == [True, False, False]
    with pytest.raises(ValueError, match=r"task_id 2 is not in job 'worker', whose ids are \[1, 3\]"):
        validate_roles(spec, "worker", 2)


@pytest.mark.parametrize(
    "wrong",
    [
        None, 3, ["w0:1"], {"worker": "w0:1"}, {"worker": [1]}, {"worker": 1}, {1: []}, {"worker": {"x": "w0:1"}},
        {"worker": {-1: "w0:1"}}, {"worker": {0.5: "w0:1"}}, {"worker": {0: 5}},
    ],
)  # fmt: skip
def test_spec_of_anything_else_is_refused(wrong: Any) -> None:
    """T235, TypeErrors."""
    with pytest.raises(TypeError, match="ClusterSpec got"):
        ClusterSpec(wrong)


def test_unknown_job_and_index_are_refused_with_those_there_are() -> None:
    """1.4.11."""
    spec = ClusterSpec({"worker": ["w0:1", "w1:1"]})
    with pytest.raises(ValueError, match=r"no job 'ps'; its jobs are \['worker'\]"):
        spec.num_tasks("ps")
    for index in (2, -1):
        with pytest.raises(ValueError, match=rf"no task {index} in job 'worker'; its indices are 0 to 1"):
            spec.task_address("worker", index)


# Roles

CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"], "evaluator": ["e:1"]})
NO_CHIEF = ClusterSpec({"worker": ["w0:1", "w1:1"]})


@pytest.mark.parametrize(
    ("spec", "task_type", "task_id", "expected"),
    [
        (CHIEF, "chief", 0, 0),
        (CHIEF, "worker", 0, 1),
        (CHIEF, "worker", 1, 2),
        (NO_CHIEF, "worker", 0, 0),
        (NO_CHIEF, "worker", 1, 1),
        (CHIEF, "evaluator", 0, 0),
    ],
)
def test_workers_are_numbered_after_the_chief(spec: ClusterSpec, task_type: str, task_id: int, expected: int) -> None:
    """1.4.11, id_in_cluster."""
    assert id_in_cluster(spec, task_type, task_id) == expected


def test_parameter_server_has_no_number() -> None:
    """1.4.11, id_in_cluster of ps."""
    with pytest.raises(ValueError, match="id_in_cluster got task_type 'ps'"):
        id_in_cluster(CHIEF, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({"worker": ["a", "b"]}, "worker", 2, "task_id 2 exceeds the maximum id 1"),
        ({"worker": ["a", "b"]}, "worker", -1, "negative"),
        ({"worker": ["a", "b"]}, "foo", 0, "Unrecognized task_type 'foo'"),
        ({"worker": ["a", "b"]}, "ps", 0, "'ps' is not in the cluster"),
        ({"worker": ["a"], "foo": ["b"]}, "worker", 0, "job 'foo'"),
        ({"chief": ["a", "b"]}, "chief", 0, "2 tasks in job 'chief'"),
        ({"evaluator": ["a", "b"]}, "evaluator", 0, "2 tasks in job 'evaluator'"),
    ],
)
def test_bad_task_is_refused(cluster: dict[str, list[str]], task_type: str, task_id: int, message: str) -> None:
    """T238."""
    with pytest.raises(ValueError, match=message):
        validate_roles(ClusterSpec(cluster), task_type, task_id)


# SimpleClusterResolver


def test_simple_resolver_gives_what_it_got() -> None:
    """T235; T232 as far as it has a meaning with one device a rank."""
    resolver = SimpleClusterResolver(NO_CHIEF, "m:1", "worker", 1, "cloud", {"TPU": 2, "GPU": 2}, "grpc")
    assert resolver.cluster_spec() == NO_CHIEF
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == "cloud"
    assert resolver.num_accelerators() == {"TPU": 2, "GPU": 2}
    assert (resolver.num_tasks, resolver.rank) == (2, 1)


def test_simple_resolver_knows_nothing_by_itself() -> None:
    """T235."""
    resolver = SimpleClusterResolver(ClusterSpec({}))
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == ("", "", {})
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=7, rank=3)


def test_simple_master_is_the_task_asked_for_or_the_one_given() -> None:
    """T235."""
    resolver = SimpleClusterResolver(NO_CHIEF, "m:1", "worker", 1, rpc_layer="grpc")
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://w0:1"
    assert resolver.master("worker", 0, "ab") == "ab://w0:1"
    assert resolver.master(rpc_layer="ab") == "ab://m:1"
    assert SimpleClusterResolver(NO_CHIEF, "m:1").master() == "m:1"


def test_simple_task_can_be_set() -> None:
    """T235."""
    resolver = SimpleClusterResolver(CHIEF, task_type="worker", task_id=1)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, "test"
    assert (resolver.task_type, resolver.task_id, resolver.rank) == ("chief", 0, 0)
    assert resolver.master("worker", 1) == "test://w1:1"


def test_simple_resolver_refuses_other_types() -> None:
    """T235."""
    with pytest.raises(TypeError, match="it needs a ClusterSpec"):
        SimpleClusterResolver({"worker": ["w0:1"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="master=5"):
        SimpleClusterResolver(NO_CHIEF, 5)  # type: ignore[arg-type]


# TFConfigClusterResolver

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]}


def tf_config(**config: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(config)}


def test_tf_config_gives_the_cluster_as_written() -> None:
    """T227."""
    resolver = TFConfigClusterResolver(environ=tf_config(cluster=CLUSTER, task={"type": "ps", "index": 0}))
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master() == "ps0:2222"
    assert (resolver.num_tasks, resolver.rank) == (3, None)


def test_tf_config_yields_to_arguments_and_those_to_setters() -> None:
    """T229."""
    environ = tf_config(cluster=CLUSTER, task={"type": "ps", "index": 1}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver("ps", 0, environ=environ)
    assert resolver.master() == "grpc://ps0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"
    assert resolver.master() == "test://worker1:2222"
    assert resolver.master("ps", 1, "ab") == "ab://ps1:2222"
    assert resolver.rank == 1


@pytest.mark.parametrize("by_argument", [True, False])
def test_tf_config_casts_type_and_index(by_argument: bool) -> None:
    """T230."""
    if by_argument:
        resolver = TFConfigClusterResolver(123456, "1", environ={})  # type: ignore[arg-type]
    else:
        resolver = TFConfigClusterResolver(environ=tf_config(task={"type": 123456, "index": "1"}))
    assert resolver.task_type == "123456"
    assert resolver.task_id == 1


def test_tf_config_session_master_wins() -> None:
    """1.4.11, session_master."""
    environ = tf_config(cluster=CLUSTER, task={"type": "ps", "index": 0}, session_master="master:1")
    assert TFConfigClusterResolver(environ=environ).master() == "master:1"


@pytest.mark.parametrize(
    "environ",
    [{}, {"TF_CONFIG": ""}, tf_config(), tf_config(cluster={}), tf_config(cluster={"worker": ["w0:1"]})],
)
def test_tf_config_of_one_task_or_none_needs_no_master(environ: dict[str, str]) -> None:
    """1.4.11, master."""
    assert TFConfigClusterResolver(environ=environ).master() == ""


def test_tf_config_without_cluster_says_nothing() -> None:
    """1.4.11, empty spec."""
    resolver = TFConfigClusterResolver(environ=tf_config(task={"type": "worker", "index": 3}))
    assert not resolver.cluster_spec()
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=8, rank=1)


def test_tf_config_is_read_when_asked() -> None:
    """1.4.11."""
    environ: dict[str, str] = {}
    resolver = TFConfigClusterResolver(environ=environ)
    environ.update(tf_config(cluster=CLUSTER))
    assert resolver.cluster_spec() == CLUSTER


def test_tf_config_counts_chief_and_workers() -> None:
    """T236, through a resolver."""
    cluster = {"worker": ["w0:1", "w1:1"], "chief": ["c:1"], "evaluator": ["e:1"]}
    ranks = {}
    for task_type, task_id in [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]:
        environ = tf_config(cluster=cluster, task={"type": task_type, "index": task_id})
        resolver = TFConfigClusterResolver(environ=environ)
        assert resolver.num_tasks == 3
        ranks[task_type, task_id] = resolver.rank
    assert ranks == {("chief", 0): 0, ("worker", 0): 1, ("worker", 1): 2, ("evaluator", 0): None}


def test_tf_config_task_outside_the_cluster_is_refused() -> None:
    """T238."""
    environ = tf_config(cluster={"worker": ["a:1", "b:1"]}, task={"type": "worker", "index": 2})
    with pytest.raises(ValueError, match="exceeds the maximum id"):
        TFConfigClusterResolver(environ=environ).check(2, 0)


def test_tf_config_counts_visible_gpus() -> None:
    """T232 as far as it has a meaning; X37, X38."""
    for environ, gpus in [({}, 0), ({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2)]:
        assert TFConfigClusterResolver(environ=environ).num_accelerators() == {"GPU": gpus}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "TF_CONFIG holds"),
        ('{"task": 5}', '"task": 5'),
        ('{"task": {"index": "x"}}', "\"index\": 'x'"),
        ('{"task": {"index": -1}}', '"index": -1'),
    ],
)
def test_malformed_tf_config_is_refused_with_its_text(text: str, message: str) -> None:
    """1.4.11."""
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        _ = TFConfigClusterResolver(environ={"TF_CONFIG": text}).task_id
    assert message in str(error.value)


def test_unknown_own_task_is_refused_with_advice() -> None:
    """1.4.11, master without a task."""
    with pytest.raises(ValueError, match="pass task_type and task_id"):
        TFConfigClusterResolver(environ=tf_config(cluster=CLUSTER)).master()


# The interface


def test_check_names_who_what_and_what_to_do() -> None:
    """Style rule 16."""
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["w"] * 8}), task_type="worker", task_id=2)
    resolver.check(8, 2)
    with pytest.raises(TopologyError, match=r"^SimpleClusterResolver says 8 tasks .* but MPI has 4 rank") as error:
        resolver.check(4, 2)
    assert "`mpiexec -n 8`" in str(error.value)
    assert "`srun --mpi=pmi2 -n 8`" in str(error.value)
    with pytest.raises(TopologyError, match=r"this process is worker 2, index 2 .* but MPI says rank 3 of 8"):
        resolver.check(8, 3)


def test_resolver_of_the_users_own_needs_four_methods() -> None:
    """Architecture: an extension touches one file."""

    class TwoHosts(ClusterResolver):
        def __init__(self) -> None:
            pass

        def cluster_spec(self) -> ClusterSpec:
            return ClusterSpec({"worker": ["a:1", "b:1"]})

        def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
            return self.address_of(task_type, task_id, rpc_layer)

        def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
            return {"GPU": 1}

        def find_own_task(self) -> OwnTask:
            return OwnTask("worker", 1)

    resolver = TwoHosts()
    assert (resolver.master(), resolver.num_tasks, resolver.rank) == ("b:1", 2, 1)
    assert resolver.environment == ""
    resolver.check(2, 1)


def test_resolvers_import_no_mpi() -> None:
    """api.md section 1: importing starts neither MPI nor CUDA."""
    code = (
        "import sys, mpidist.cluster_resolver as resolvers; resolvers.MPIClusterResolver(); "
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    root = str(pathlib.Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": root})


def test_tf_config_of_some_tasks_is_compared_with_nothing() -> None:
    """Nobody knows how many there are."""
    environ = tf_config(cluster={"worker": {"1": "w1:1"}}, task={"type": "worker", "index": 1})
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.master("worker", 1) in ("", "w1:1")
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=8, rank=5)


# UnionResolver


def simple(cluster: dict[str, Any], **task: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **task)


def test_union_of_lists_numbers_tasks_anew() -> None:
    """T233."""
    one = simple({"worker": ["a:1", "b:1"], "ps": ["p:1"]})
    resolver = UnionResolver(one, simple({"worker": ["c:1"], "chief": ["d:1"]}))
    assert resolver.cluster_spec() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["p:1"], "chief": ["d:1"]}
    assert resolver.num_tasks == 4


def test_union_with_indices_keeps_them() -> None:
    """1.4.11."""
    known = simple({"worker": {2: "c:1"}})
    assert UnionResolver(simple({"worker": ["a:1", "b:1"]}), known).cluster_spec() == {"worker": ["a:1", "b:1", "c:1"]}
    with pytest.raises(KeyError, match=r"Duplicate keys.*task 2"):
        UnionResolver(known, known).cluster_spec()


def test_union_speaks_for_its_first_member() -> None:
    """1.4.11."""
    first = simple({"worker": ["a:1"]}, master="m:1", task_type="worker", task_id=0, environment="here", rpc_layer="x")
    second = simple({"worker": ["b:1"]}, task_type="worker", task_id=5, num_accelerators={"GPU": 2})
    resolver = UnionResolver(first, second)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "x")
    assert (resolver.master(), resolver.master("worker", 1)) == ("x://m:1", "x://b:1")
    assert (resolver.environment, resolver.num_accelerators()) == ("here", {})
    other = UnionResolver(second, first, rpc_layer="grpc", task_type="worker", task_id=1)
    assert (other.task_id, other.master("worker", 1), other.num_accelerators()) == (1, "grpc://a:1", {"GPU": 2})
    other.check(2, 1)


def test_union_of_nothing_or_of_others_is_refused() -> None:
    """1.4.11."""
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="ClusterSpec"):
        UnionResolver(ClusterSpec({}))  # type: ignore[arg-type]
