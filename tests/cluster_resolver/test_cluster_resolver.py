"""Environments in, addresses and numbers out."""

import json

import pytest

from mpidist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from mpidist.cluster_resolver.resolver import OwnTask
from mpidist.errors import TopologyError

pytestmark = pytest.mark.no_mpi


# ClusterSpec


def test_spec_returns_its_jobs_tasks_and_addresses():
    spec = ClusterSpec({"ps": ["ps0:1"], "worker": ("w0:1", "w1:1")})
    assert spec.as_dict() == {"ps": ["ps0:1"], "worker": ["w0:1", "w1:1"]}
    assert spec.jobs == ["ps", "worker"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
    assert spec.task_address("worker", 1) == "w1:1"
    assert spec.job_tasks("worker") == ["w0:1", "w1:1"]
    with pytest.raises(ValueError, match=r"no job 'chief'; its jobs are \['ps', 'worker'\]"):
        spec.num_tasks("chief")
    for index in (2, -1):
        with pytest.raises(ValueError, match=rf"no task {index} in job 'worker'; its indices are 0 to 1"):
            spec.task_address("worker", index)


def test_spec_equals_its_copy_and_its_dict_and_cannot_be_changed_through_them():
    addresses = ["w0:1"]
    spec = ClusterSpec({"worker": addresses})
    addresses.append("w1:1")
    spec.as_dict()["worker"].append("w2:1")
    spec.job_tasks("worker").append("w3:1")
    spec.jobs.append("ps")
    assert spec == ClusterSpec(spec) == {"worker": ["w0:1"]}
    assert spec == {"worker": ("w0:1",)}
    assert spec != ClusterSpec({"worker": ["w1:1"]})
    assert spec != "worker"
    assert spec
    assert not ClusterSpec({})


def test_spec_of_some_tasks_is_sparse():
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


def test_spec_of_anything_else_is_refused():
    jobs = ["w0:1", [1], 1, {"x": "w0:1"}, {-1: "w0:1"}, {0.5: "w0:1"}, {0: 5}]
    wrong = [None, 3, ["w0:1"], {1: []}, *({"worker": job} for job in jobs)]
    for one in wrong:
        with pytest.raises(TypeError, match="ClusterSpec got"):
            ClusterSpec(one)


# Roles

CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"], "evaluator": ["e:1"]})
NO_CHIEF = ClusterSpec({"worker": ["w0:1", "w1:1"]})


def rank_of(cluster, task_type, task_id):
    return SimpleClusterResolver(cluster, task_type=task_type, task_id=task_id).rank


def test_workers_are_numbered_after_the_chief():
    numbers = {("chief", 0): 0, ("worker", 0): 1, ("worker", 1): 2, ("evaluator", 0): None, ("ps", 0): None}
    assert {task: rank_of(CHIEF, *task) for task in numbers} == numbers
    assert [rank_of(NO_CHIEF, "worker", task_id) for task_id in (0, 1)] == [0, 1]


def test_bad_task_is_refused():
    two, chiefs, evaluators = {"worker": ["a", "b"]}, {"chief": ["a", "b"]}, {"evaluator": ["a", "b"]}
    tasks = [
        (two, "worker", 2, "task_id 2 exceeds the maximum id 1"),
        (two, "worker", -1, "negative"),
        (two, "chief", 0, "'chief' is not in the cluster"),
        ({"worker": ["a"], "foo": ["b"]}, "worker", 0, "job 'foo'"),
        (chiefs, "chief", 0, "2 tasks in job 'chief'"),
        (two | evaluators, "worker", 0, "2 tasks in job 'evaluator'"),
    ]
    for cluster, task_type, task_id, message in tasks:
        with pytest.raises(ValueError, match=message):
            assert rank_of(ClusterSpec(cluster), task_type, task_id) is None


# SimpleClusterResolver


def test_simple_resolver_returns_its_arguments():
    resolver = SimpleClusterResolver(NO_CHIEF, "m:1", "worker", 1, "cloud", {"TPU": 2, "GPU": 2}, "grpc")
    assert resolver.cluster_spec() == NO_CHIEF
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == "cloud"
    assert resolver.num_accelerators() == {"TPU": 2, "GPU": 2}
    assert (resolver.num_tasks, resolver.rank) == (2, 1)
    assert (resolver.master(), resolver.master(rpc_layer="ab")) == ("grpc://m:1", "ab://m:1")
    assert (resolver.master("worker", 0), resolver.master("worker", 0, "ab")) == ("grpc://w0:1", "ab://w0:1")
    resolver = SimpleClusterResolver(CHIEF, task_type="worker", task_id=1)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, "test"
    assert (resolver.task_type, resolver.task_id, resolver.rank) == ("chief", 0, 0)
    assert resolver.master("worker", 1) == "test://w1:1"


def test_simple_resolver_without_arguments_is_empty():
    resolver = SimpleClusterResolver(ClusterSpec({}))
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == ("", "", {})
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=7, rank=3)
    with pytest.raises(TypeError, match="it needs a ClusterSpec"):
        SimpleClusterResolver({"worker": ["w0:1"]})
    with pytest.raises(TypeError, match="master=5"):
        SimpleClusterResolver(NO_CHIEF, 5)


# TFConfigClusterResolver

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]}


def tf_config(**config):
    return {"TF_CONFIG": json.dumps(config)}


def test_tf_config_gives_the_cluster_as_written():
    resolver = TFConfigClusterResolver(environ=tf_config(cluster=CLUSTER, task={"type": "ps", "index": 0}))
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master() == "ps0:2222"
    assert (resolver.num_tasks, resolver.rank) == (3, None)


def test_tf_config_yields_to_arguments_and_those_to_setters():
    environ = tf_config(cluster=CLUSTER, task={"type": "ps", "index": 1}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver("ps", 0, environ=environ)
    assert resolver.master() == "grpc://ps0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"
    assert resolver.master() == "test://worker1:2222"
    assert resolver.master("ps", 1, "ab") == "ab://ps1:2222"
    assert resolver.rank == 1


def test_tf_config_casts_type_and_index():
    wrong = 123456
    for resolver in (
        TFConfigClusterResolver(wrong, "1", environ={}),
        TFConfigClusterResolver(environ=tf_config(task={"type": 123456, "index": "1"})),
    ):
        assert (resolver.task_type, resolver.task_id) == ("123456", 1)


def test_tf_config_master_is_the_session_master_and_not_needed_for_one_task_or_none():
    environ = tf_config(cluster=CLUSTER, task={"type": "ps", "index": 0}, session_master="master:1")
    assert TFConfigClusterResolver(environ=environ).master() == "master:1"
    with pytest.raises(ValueError, match="pass task_type and task_id"):
        TFConfigClusterResolver(environ=tf_config(cluster=CLUSTER)).master()
    for environ in ({}, {"TF_CONFIG": ""}, tf_config(), tf_config(cluster={}), tf_config(cluster={"worker": ["w0:1"]})):
        assert TFConfigClusterResolver(environ=environ).master() == ""


def test_tf_config_without_cluster_is_empty():
    resolver = TFConfigClusterResolver(environ=tf_config(task={"type": "worker", "index": 3}))
    assert not resolver.cluster_spec()
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=8, rank=1)


def test_tf_config_counts_visible_gpus():
    for environ, gpus in [({}, 0), ({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2)]:
        assert TFConfigClusterResolver(environ=environ).num_accelerators() == {"GPU": gpus}


def test_malformed_tf_config_is_refused_with_its_text():
    for text, message in (
        ("{", "not JSON"),
        ("[1]", "TF_CONFIG holds"),
        ('{"task": 5}', '"task": 5'),
        ('{"task": {"index": "x"}}', "\"index\": 'x'"),
        ('{"task": {"index": -1}}', '"index": -1'),
    ):
        with pytest.raises(ValueError, match="TF_CONFIG") as error:
            _ = TFConfigClusterResolver(environ={"TF_CONFIG": text}).task_id
        assert message in str(error.value)


# The interface


def test_check_names_resolver_numbers_and_remedy():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["w"] * 8}), task_type="worker", task_id=2)
    resolver.check(8, 2)
    with pytest.raises(TopologyError, match=r"^SimpleClusterResolver has 8 tasks .* but MPI has 4 rank") as error:
        resolver.check(4, 2)
    assert "`mpiexec -n 8`" in str(error.value)
    assert "`srun --mpi=pmi2 -n 8`" in str(error.value)
    with pytest.raises(TopologyError, match=r"this process is worker 2, index 2 .* but in MPI it is rank 3 of 8"):
        resolver.check(8, 3)
    resolver.task_type = "trainer"
    with pytest.raises(ValueError, match="Unrecognized task_type 'trainer'"):
        resolver.check(8, 3)


def test_resolver_of_the_users_own_needs_four_methods():

    class TwoHosts(ClusterResolver):
        def __init__(self):
            pass

        def cluster_spec(self):
            return ClusterSpec({"worker": ["a:1", "b:1"]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return self.address_of(task_type, task_id, rpc_layer)

        def num_accelerators(self, task_type=None, task_id=None):
            return {"GPU": 1}

        def find_own_task(self):
            return OwnTask("worker", 1)

    resolver = TwoHosts()
    assert (resolver.master(), resolver.num_tasks, resolver.rank) == ("b:1", 2, 1)
    assert resolver.environment == ""
    resolver.check(2, 1)


class Given(ClusterResolver):
    """A resolver of a user's, which returns what it was given."""

    def __init__(self, spec, task):
        self.spec, self.task = spec, task

    def cluster_spec(self):
        return self.spec

    def find_own_task(self):
        return self.task


@pytest.mark.parametrize("outer", [lambda given: given, UnionResolver])
def test_results_of_another_kind_are_refused(outer):
    spec, task = ClusterSpec({"worker": ["a:1"]}), OwnTask("worker", 0)
    for given, why in (
        (Given({"worker": ["a:1"]}, task), r"cluster_spec\(\) must return a ClusterSpec, got an object of .*dict"),
        (Given(None, task), r"cluster_spec\(\) must return a ClusterSpec, got None"),
        (Given(spec, ("worker", 0)), r"find_own_task\(\) must return an OwnTask, got \('worker', 0\)"),
        (Given(spec, OwnTask("worker", "0")), r"find_own_task\(\) must be a whole number, or None, got '0'"),
    ):
        with pytest.raises(TypeError, match=f"Given.{why}"):
            outer(given).check(1, 0)


def test_task_without_an_index_is_compared_with_nothing():
    Given(ClusterSpec({"worker": ["a:1", "b:1"]}), OwnTask("worker")).check(2, 1)


def test_tf_config_of_some_tasks_is_compared_with_nothing():
    """Nobody knows how many there are."""
    environ = tf_config(cluster={"worker": {"1": "w1:1"}}, task={"type": "worker", "index": 1})
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.master("worker", 1) in ("", "w1:1")
    assert (resolver.num_tasks, resolver.rank) == (None, None)
    resolver.check(size=8, rank=5)


# UnionResolver


def simple(cluster, **task):
    return SimpleClusterResolver(ClusterSpec(cluster), **task)


def test_union_of_lists_numbers_tasks_anew():
    one = simple({"worker": ["a:1", "b:1"], "ps": ["p:1"]})
    resolver = UnionResolver(one, simple({"worker": ["c:1"], "chief": ["d:1"]}))
    assert resolver.cluster_spec() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["p:1"], "chief": ["d:1"]}
    assert resolver.num_tasks == 4


def test_union_with_indices_keeps_them():
    known = simple({"worker": {2: "c:1"}})
    assert UnionResolver(simple({"worker": ["a:1", "b:1"]}), known).cluster_spec() == {"worker": ["a:1", "b:1", "c:1"]}
    with pytest.raises(KeyError, match=r"Duplicate keys.*task 2"):
        UnionResolver(known, known).cluster_spec()


def test_union_speaks_for_its_first_member():
    first = simple({"worker": ["a:1"]}, master="m:1", task_type="worker", task_id=0, environment="here", rpc_layer="x")
    second = simple({"worker": ["b:1"]}, task_type="worker", task_id=5, num_accelerators={"GPU": 2})
    resolver = UnionResolver(first, second)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "x")
    assert (resolver.master(), resolver.master("worker", 1)) == ("x://m:1", "x://b:1")
    assert (resolver.environment, resolver.num_accelerators()) == ("here", {})
    other = UnionResolver(second, first, rpc_layer="grpc", task_type="worker", task_id=1)
    assert (other.task_id, other.master("worker", 1), other.num_accelerators()) == (1, "grpc://a:1", {"GPU": 2})
    other.check(2, 1)


def test_union_of_nothing_or_of_others_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="ClusterSpec"):
        UnionResolver(ClusterSpec({}))
