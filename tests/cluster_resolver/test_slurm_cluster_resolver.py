"""Environments of Slurm steps in, addresses, ranks and GPUs out; and Slurm's short forms of hosts, written out."""

import json
import pathlib

import pytest

from mpidist.cluster_resolver import SlurmClusterResolver
from mpidist.cluster_resolver.gpus import visible_gpus
from mpidist.cluster_resolver.host_list import expand_host_list, expand_tasks_per_node
from mpidist.errors import TopologyError

pytestmark = pytest.mark.no_mpi

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"

# As TF's tests

THREE_NODES = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "t02n13,t02n41,t02n43",
}
THREE_ADDRESSES = {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
# SLURM_DISTRIBUTION is not in TF's tests; srun always sets it.
FIVE_TASKS = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
    "SLURM_STEP_NODELIST": "t02n13,t02n41,t02n43",
    "SLURM_DISTRIBUTION": "block",
}
FIVE_ADDRESSES = ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t02n43:8888", "t02n43:8889"]


def test_slurm_resolver_reads_the_environment_at_its_first_call():
    environ = {}
    resolver = SlurmClusterResolver(environ=environ)
    environ.update(THREE_NODES, CUDA_VISIBLE_DEVICES="0")
    assert resolver.cluster_spec() == THREE_ADDRESSES
    assert resolver.master("worker", 0) == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_slurm_master_follows_the_task_and_layer_set():
    resolver = SlurmClusterResolver({"worker": 3}, environ=dict(THREE_NODES))
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://t02n41:8888"
    resolver.task_id = 2
    assert resolver.master() == "grpc://t02n43:8888"
    resolver.rpc_layer = "ab"
    assert resolver.master("worker", 0) == "ab://t02n13:8888"
    assert resolver.master("worker", 0, rpc_layer="test") == "test://t02n13:8888"


def test_slurm_task_gets_several_gpus():
    for visible in ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}):
        environ = {**FIVE_TASKS, **visible}
        resolver = SlurmClusterResolver({"worker": 5}, 8888, 4, 2, environ=environ)
        assert resolver.cluster_spec() == {"worker": FIVE_ADDRESSES}
        assert resolver.num_accelerators() == {"GPU": 2}
        assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_slurm_jobs_get_ranks_in_alphabetical_order():
    owners = []
    for rank in range(5):
        environ = {**FIVE_TASKS, "SLURM_PROCID": str(rank)}
        resolver = SlurmClusterResolver({"worker": 2, "ps": 2, "chief": 1}, environ=environ)
        owners.append((*resolver.get_task_info(), resolver.rank))
    assert resolver.cluster_spec() == {
        "chief": FIVE_ADDRESSES[:1],
        "ps": FIVE_ADDRESSES[1:3],
        "worker": FIVE_ADDRESSES[3:],
    }
    assert owners == [("chief", 0, 0), ("ps", 0, None), ("ps", 1, None), ("worker", 0, 1), ("worker", 1, 2)]
    assert resolver.num_tasks == 3


# Every recorded task

SHAPES = sorted(path.stem for path in (FIXTURES / "slurm-env").iterdir())
EVEN_2_2 = ["n1:8888", "n1:8889", "n2:8888", "n2:8889"]
FOUR_EACH = [8888, 8889, 8890, 8891]
ADDRESSES = {
    "1node-1task": ["n1:8888"],
    "1node-2tasks-array-1of2": ["n1:8888", "n1:8889"],
    "1node-2tasks-of-2node-job": ["n1:8888", "n1:8889"],
    "1node-4tasks-pmi2": [f"n1:{port}" for port in FOUR_EACH],
    "2nodes-3tasks-het": ["n1:8888", "n2:8888", "n2:8889"],
    "2nodes-4tasks-cyclic": ["n1:8888", "n2:8888", "n1:8889", "n2:8889"],
    "2nodes-4tasks-gres-gpu-2": EVEN_2_2,
    "2nodes-4tasks-none": EVEN_2_2,
    "2nodes-4tasks-pmi2": EVEN_2_2,
    "2nodes-4tasks-pmix": EVEN_2_2,
    "2nodes-4tasks-uneven-3-1": ["n1:8888", "n1:8889", "n1:8890", "n2:8888"],
    "2nodes-8tasks-gpus-per-task-1": [f"{node}:{port}" for node in ("n1", "n2") for port in FOUR_EACH],
    "2nodes-cpus-per-task-2": EVEN_2_2,
    "2nodes-nonadjacent": ["n1:8888", "n1:8889", "n3:8888", "n3:8889"],
    "4nodes-16tasks-gpus-per-node-4": [f"n{node}:{port}" for node in (1, 2, 3, 4) for port in FOUR_EACH],
    "4nodes-8tasks-pmi2": [f"n{node}:{port}" for node in (1, 2, 3, 4) for port in (8888, 8889)],
}


def tasks_of(shape):
    return json.loads((FIXTURES / "slurm-env" / f"{shape}.json").read_text())["tasks"]


GPUS = {
    "2nodes-4tasks-gres-gpu-2": ["0", "1"] * 2,
    "2nodes-8tasks-gpus-per-task-1": ["0", "1", "2", "3"] * 2,
    "4nodes-16tasks-gpus-per-node-4": ["0", "1", "2", "3"] * 4,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_slurm_recorded_tasks_find_addresses_rank_and_gpus(shape):
    """On environments of a real Slurm; with --gpus-per-task each task sees one device."""
    tasks, gpus = tasks_of(shape), GPUS.get(shape)
    for rank, environ in enumerate(tasks):
        before = dict(environ)
        idle = SlurmClusterResolver(auto_set_gpu=False, environ=environ)
        assert idle.cluster_spec().num_tasks("worker") == int(environ["SLURM_STEP_NUM_TASKS"])
        idle.num_accelerators()
        assert environ == before
        resolver = SlurmClusterResolver(environ=environ)
        assert resolver.cluster_spec() == {"worker": ADDRESSES[shape]}
        assert (resolver.num_tasks, resolver.rank) == (len(tasks), rank)
        assert resolver.get_task_info() == ("worker", rank)
        assert resolver.master() == f"grpc://{ADDRESSES[shape][rank]}"
        assert resolver.master().startswith(f"grpc://{environ['SLURMD_NODENAME']}:")
        resolver.check(len(tasks), rank)
        counts = resolver.num_accelerators()
        assert counts == {"GPU": 0 if gpus is None else 1}
        assert environ.get("CUDA_VISIBLE_DEVICES") == (None if gpus is None else gpus[rank])
        assert gpus is not None or environ == before
        after = dict(environ)  # a strategy and the user may each have a resolver
        assert SlurmClusterResolver(environ=environ).num_accelerators() == counts == resolver.num_accelerators()
        assert environ == after


def test_slurm_recorded_tasks_refuse_a_wrong_world():
    """The commonest broken job trains N models in silence."""
    for tasks in map(tasks_of, set(SHAPES) - {"1node-1task"}):
        for rank, environ in enumerate(tasks):
            resolver = SlurmClusterResolver(environ=environ)
            text = rf"SlurmClusterResolver .*{len(tasks)} tasks.* 1 rank.*`mpiexec -n {len(tasks)}`.*srun"
            with pytest.raises(TopologyError, match=text):
                resolver.check(1, 0)
            with pytest.raises(TopologyError, match=f"index {rank} of chief and workers, but in MPI it is rank"):
                resolver.check(len(tasks), (rank + 1) % len(tasks))


def test_batch_shell_is_no_step():
    batch = json.loads((FIXTURES / "slurm-env" / "2nodes-4tasks-pmi2.json").read_text())["batch"]
    with pytest.raises(RuntimeError, match="SLURM_STEP_NUM_TASKS not found in environment") as error:
        SlurmClusterResolver(environ=batch).cluster_spec()
    assert "srun" in str(error.value)


def test_missing_step_variable_is_named():
    for missing in THREE_NODES:
        environ = {name: value for name, value in THREE_NODES.items() if name != missing}
        with pytest.raises(TopologyError, match=f"{missing} not found in environment"):
            SlurmClusterResolver(environ=environ).cluster_spec()


# Order of ranks


def nodes_of(distribution, counts, hosts, **task):
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(int(count) for count in counts.split(","))),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NODELIST": hosts,
        **task,
    }
    if distribution is not None:
        environ["SLURM_DISTRIBUTION"] = distribution
    spec = SlurmClusterResolver(environ=environ).cluster_spec()
    return " ".join(address.split(":")[0].removeprefix("n") for address in spec.job_tasks("worker"))


# SLURM_DISTRIBUTION, tasks of each node, nodes; the node of each task.
LAYOUTS = [
    ("block", "1,1,1", "n[8-10]", "8 9 10"),
    ("cyclic", "1,1,1", "n[8-10]", "8 9 10"),
    ("block", "1,1,1", "n10,n8,n9", "10 8 9"),
    ("block", "1,3,2", "n[1-3]", "1 2 2 2 3 3"),
    ("block:cyclic:fcyclic,NoPack", "2,2", "n[1-2]", "1 1 2 2"),
    ("block,Pack", "3,1", "n[1-2]", "1 1 1 2"),
    ("cyclic:block", "2,2", "n[1-2]", "1 2 1 2"),
    ("cyclic", "1,3,2", "n[1-3]", "1 2 3 2 3 2"),
    ("plane=2", "4,4", "n[1-2]", "1 1 2 2 1 1 2 2"),
    ("plane=2", "3,2", "n[1-2]", "1 1 2 2 1"),
    ("arbitrary", "3", "n1", "1 1 1"),
    (None, "3", "n1", "1 1 1"),
    (None, "1,1,1", "n[8-10]", "8 9 10"),
]


def test_ranks_are_placed_as_slurm_places_them():
    """TF sorts hosts as strings (n10 before n8) and takes every layout for block."""
    for distribution, counts, hosts, expected in LAYOUTS:
        assert nodes_of(distribution, counts, hosts) == expected, (distribution, counts, hosts)
    assert nodes_of("plane", "4,4", "n[1-2]", SLURM_DIST_PLANESIZE="2") == "1 1 2 2 1 1 2 2"
    with pytest.raises(ValueError, match="SLURM_DIST_PLANESIZE=''"):
        nodes_of("plane", "4,4", "n[1-2]")
    with pytest.raises(TopologyError, match="SLURM_DISTRIBUTION='arbitrary'"):  # rather an error than a guess
        nodes_of("arbitrary", "1,1", "n[1-2]")
    assert nodes_of("block", "1,1,1", "n[8-10]", SLURM_PROCID="1", SLURM_NODEID="1", SLURMD_NODENAME="n9")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "0"}, "1 1 2 2"),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "1 2 1 2"),
        ({"SLURM_PROCID": "0", "SLURM_GTIDS": "0,1"}, "1 1 2 2"),
        ({"SLURM_PROCID": "0", "SLURM_GTIDS": "0,2"}, "1 2 1 2"),
        ({"SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}, "1 2 1 2"),
    ],
)
def test_unnamed_distribution_is_found_from_this_tasks_place(task, expected):
    assert nodes_of(None, "2,2", "n[1-2]", **task) == expected


def test_silent_environment_means_slurms_default():
    """Block, as srun(1) says: also where this task's own place would fit another layout as well."""
    last = {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
    for distribution in (None, "unknown", "*"):
        assert nodes_of(distribution, "2,2", "n[1-2]") == nodes_of(distribution, "2,2", "n[1-2]", **last) == "1 1 2 2"


def silent(shape):
    """Give recorded tasks without the variables that tell how tasks are dealt to nodes."""
    untold = ("SLURM_DISTRIBUTION", "SLURM_GTIDS")
    return [{name: task[name] for name in task if name not in untold} for task in tasks_of(shape)]


@pytest.mark.parametrize("shape", SHAPES)
def test_slurm_recorded_tasks_without_layout_agree_with_mpi(shape):
    """As far as Slurm's default was the layout; where it was not, the tasks that cannot know it are told by MPI."""
    tasks = silent(shape)
    hostnames = [f"{task['SLURMD_NODENAME']}.cluster" for task in tasks]
    for rank, environ in enumerate(tasks):
        resolver = SlurmClusterResolver(auto_set_gpu=False, environ=environ)
        if resolver.cluster_spec() == {"worker": ADDRESSES[shape]}:
            resolver.check(len(tasks), rank, hostnames)
        else:
            assert shape == "2nodes-4tasks-cyclic"
            with pytest.raises(TopologyError, match=r"assumed the tasks to be on .*, but MPI has the ranks on"):
                resolver.check(len(tasks), rank, hostnames)
        with pytest.raises(TopologyError, match=f"{len(tasks)} tasks"):
            resolver.check(len(tasks) + 1, rank, [*hostnames, "n1"])


def test_slurm_given_layout_is_not_compared_by_hosts():
    """Containers have host names of their own."""
    environ = tasks_of("2nodes-4tasks-pmi2")[0]
    resolver = SlurmClusterResolver(environ=environ)
    resolver.check(4, 0, ["a", "b", "c", "d"])
    assert resolver.assumed_hosts is None


@pytest.mark.parametrize(
    ("distribution", "task", "message"),
    [
        ("block", {"SLURM_PROCID": "1", "SLURM_NODEID": "1"}, "SLURM_NODEID would be '0' and is '1'"),
        ("cyclic", {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "SLURM_LOCALID would be '0' and is '1'"),
        ("block", {"SLURM_PROCID": "0", "SLURM_GTIDS": "0,2"}, "SLURM_GTIDS would be '0,1' and is '0,2'"),
        ("block", {"SLURM_PROCID": "3", "SLURMD_NODENAME": "n1"}, "SLURMD_NODENAME would be 'n2' and is 'n1'"),
        (None, {"SLURM_PROCID": "1", "SLURM_NODEID": "2"}, "would be '0' and is '2' or SLURM_NODEID would be '1'"),
    ],
)
def test_layout_that_this_tasks_place_contradicts_is_refused(distribution, task, message):
    with pytest.raises(TopologyError, match="contradict each other") as error:
        nodes_of(distribution, "2,2", "n[1-2]", **task)
    assert message in str(error.value)


# Tasks per node, jobs, GPUs


def test_tasks_per_node_may_be_given_or_differ():
    environ = {**FIVE_TASKS, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    spec = SlurmClusterResolver(tasks_per_node=2, environ=environ).cluster_spec()
    assert spec.job_tasks("worker")[2:] == ["t02n41:8888", "t02n41:8889", "t02n43:8888"]
    tasks_per_node = {"t02n43": 2, "t02n13": 2, "t02n41": 1, "another": 7}
    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node, port_base=8888, environ=dict(FIVE_TASKS))
    assert resolver.cluster_spec() == {"worker": FIVE_ADDRESSES}
    spec = SlurmClusterResolver(port_base=1000, environ=dict(FIVE_TASKS)).cluster_spec()
    assert spec.job_tasks("worker")[:2] == ["t02n13:1000", "t02n13:1001"]


def test_tasks_per_node_that_do_not_fit_are_refused():
    for wrong in (0, 1, 3, 5, {"t02n13": 5}, {"t02n13": 1, "t02n41": 1, "t02n43": 1}):
        resolver = SlurmClusterResolver(tasks_per_node=wrong, environ=dict(FIVE_TASKS))
        with pytest.raises(TopologyError, match=r"tasks_per_node=.* for 5 tasks on"):
            resolver.cluster_spec()
    for counts in ("2(x2)", "2,2,2", "2(x4)"):
        environ = {**FIVE_TASKS, "SLURM_STEP_TASKS_PER_NODE": counts}
        with pytest.raises(TopologyError, match="SLURM_STEP_TASKS_PER_NODE="):
            SlurmClusterResolver(environ=environ).cluster_spec()


def test_jobs_that_do_not_add_up_are_refused():
    with pytest.raises(RuntimeError, match="Requested 6 tasks") as error:
        SlurmClusterResolver({"ps": 2, "worker": 4}, environ=dict(FIVE_TASKS)).cluster_spec()
    assert "step has 5" in str(error.value)
    assert "srun -n 6" in str(error.value)


def test_wrong_numbers_are_refused():
    """Steps of several parts count SLURM_PROCID over all parts."""
    with pytest.raises(TopologyError, match="SLURM_PROCID=5 in a step of 5 tasks"):
        SlurmClusterResolver(environ={**FIVE_TASKS, "SLURM_PROCID": "5"}).cluster_spec()
    with pytest.raises(ValueError, match="SLURM_PROCID='x'"):
        SlurmClusterResolver(environ={**FIVE_TASKS, "SLURM_PROCID": "x"}).cluster_spec()
    with pytest.raises(ValueError, match="SLURM_GPUS_ON_NODE='two'"):
        visible_gpus({"SLURM_GPUS_ON_NODE": "two"})
    wrong = [{"gpus_per_node": -1}, {"gpus_per_task": -1}, {"jobs": {"worker": -1}}]
    for arguments in wrong:
        with pytest.raises(ValueError, match="=-1; it needs 0 or more"):
            SlurmClusterResolver(**arguments)


VISIBLE = [
    ({}, 0),
    ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, 0),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c, MIG-4d806f22"}, 2),
    ({"SLURM_GPUS_ON_NODE": "4"}, 4),
    ({"SLURM_GPUS_ON_NODE": ""}, 0),
]


def test_gpus_are_counted_without_asking_a_driver():
    for variables, gpus in VISIBLE:
        assert len(visible_gpus(variables)) == gpus
        assert SlurmClusterResolver(environ={**THREE_NODES, **variables}).num_accelerators() == {"GPU": gpus}


# What is asked for, what is visible; how many GPUs this task has, and which are visible then.
@pytest.mark.parametrize(
    ("environ", "arguments", "gpus", "visible"),
    [
        ({**THREE_NODES, "CUDA_VISIBLE_DEVICES": ""}, {}, 0, ""),
        ({**THREE_NODES, "CUDA_VISIBLE_DEVICES": "0,1"}, {"gpus_per_node": 0}, 0, "0,1"),
        ({**FIVE_TASKS, "CUDA_VISIBLE_DEVICES": "0"}, {}, 0, "0"),  # fewer than tasks are left to be shared
        # --gpus-per-task: what Slurm bound to the task is not divided again.
        ({**FIVE_TASKS, "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"}, {}, 2, "2,3"),
        ({**FIVE_TASKS, "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb,6,7"}, {}, 2, "6,7"),
        ({**FIVE_TASKS, "CUDA_VISIBLE_DEVICES": "0,1"}, {}, 1, "1"),
    ],
)
def test_gpus_of_a_node_are_divided_among_its_tasks(environ, arguments, gpus, visible):
    environ = dict(environ)
    assert SlurmClusterResolver(environ=environ, **arguments).num_accelerators() == {"GPU": gpus}
    assert environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ({"gpus_per_task": 3}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, r"3 for 2 task\(s\) on a node, but 4 are"),
        ({"gpus_per_task": 1}, {}, "but 0 are"),
        ({"gpus_per_node": 2}, {"CUDA_VISIBLE_DEVICES": ""}, "gpus_per_node=2, but 0 are"),
        ({"gpus_per_node": 8}, {"SLURM_GPUS_ON_NODE": "4"}, "gpus_per_node=8, but 4 are"),
        ({"gpus_per_task": 2}, {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "4"}, r"2 for 1 task\(s\)"),
    ],
)
def test_more_gpus_than_visible_are_refused(arguments, variables, message):
    resolver = SlurmClusterResolver(environ={**FIVE_TASKS, **variables}, **arguments)
    with pytest.raises(RuntimeError, match="Requested more GPUs") as error:
        resolver.cluster_spec()
    error.match(message)


# Heterogeneous jobs


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [("block", "n3 n3 n1 n1 n1 n2"), ("cyclic", "n3 n3 n1 n2 n1 n1"), ("", "n3 n3 n1 n1 n1 n2")],
)
def test_components_are_dealt_out_one_by_one(distribution, hosts):
    """Ranks are in the order of the components, also where Slurm lists the nodes in another one."""
    layout = hosts.split()
    order = ["n3", "n1", "n2"]
    for rank, host in enumerate(layout):
        environ = {
            "SLURM_STEP_NUM_TASKS": "6",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NODELIST": "n[1-3]",
            "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
            "SLURM_DISTRIBUTION": distribution,
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n3",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
            "SLURM_NODEID": str(order.index(host)),
            "SLURMD_NODENAME": host,
            "SLURM_GTIDS": ",".join(str(task) for task, its_host in enumerate(layout) if its_host == host),
        }
        spec = SlurmClusterResolver(environ=environ).cluster_spec()
        assert [address.partition(":")[0] for address in spec.job_tasks("worker")] == layout


def test_components_of_a_heterogeneous_job_have_jobs_of_their_own():
    """In the order of the components, not of the alphabet."""
    expected = [("worker", 0), ("ps", 0), ("ps", 1)]
    for rank, task in enumerate(expected):
        resolver = SlurmClusterResolver(component_jobs=["worker", "ps"], environ=tasks_of("2nodes-3tasks-het")[rank])
        assert resolver.cluster_spec() == {"worker": ["n1:8888"], "ps": ["n2:8888", "n2:8889"]}
        assert resolver.get_task_info() == task


def test_components_of_one_job_are_joined():
    resolver = SlurmClusterResolver(component_jobs=["worker", "worker"], environ=tasks_of("2nodes-3tasks-het")[2])
    assert resolver.cluster_spec() == {"worker": ["n1:8888", "n2:8888", "n2:8889"]}
    assert resolver.get_task_info() == ("worker", 2)


@pytest.mark.parametrize(
    ("names", "changes", "text"),
    [
        (["ps"], {}, "the job has 2 components; name each of them"),
        (["ps", "worker"], {"SLURM_HET_SIZE": ""}, "this job is not heterogeneous"),
        (["ps", "worker"], {"SLURM_JOB_NODELIST_HET_GROUP_1": "n3"}, "over all 2 components"),
        (["ps", "worker"], {"SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]"}, "on nodes of their own"),
    ],
)
def test_components_that_do_not_fit_are_refused(names, changes, text):
    environ = {**tasks_of("2nodes-3tasks-het")[0], **changes}
    with pytest.raises(TopologyError, match=text):
        SlurmClusterResolver(component_jobs=names, environ=environ).cluster_spec()


def test_jobs_are_named_in_one_way():
    with pytest.raises(ValueError, match="leave one of the two out"):
        SlurmClusterResolver({"worker": 3}, component_jobs=["worker"])


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[001-003,7],gpu7", ["n001", "n002", "n003", "n7", "gpu7"]),
        ("n[099-101],m3", ["n099", "n100", "n101", "m3"]),
        ("t02n[13,41,43]", ["t02n13", "t02n41", "t02n43"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
        ("n[1-2].cluster.org,login.cluster.org", ["n1.cluster.org", "n2.cluster.org", "login.cluster.org"]),
        ("[1-2]n", ["1n", "2n"]),
        ("n10,n8,n9", ["n10", "n8", "n9"]),
        ("n3,n1,n3", ["n3", "n1", "n3"]),
    ],
)
def test_host_list_is_written_out_in_its_own_order(text, hosts):
    assert expand_host_list(text) == hosts


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("", "character 1", "a host name is missing"),
        ("n1,,n2", "character 4", "a host name is missing"),
        ("n1,", "character 4", "a host name is missing"),
        (",n1", "character 1", "a host name is missing"),
        ("n[3-1]", "character 3", "runs backwards"),
        ("m7,n[1,9-8]", "character 8", "runs backwards"),
        ("n[1-2", "character 2", "not closed"),
        ("n1-2]", "character 5", "unexpected ']'"),
        ("n[]", "character 3", "''"),
        ("n[1,,2]", "character 5", "''"),
        ("n[1-2-3]", "character 3", "'1-2-3'"),
        ("n[-2]", "character 3", "'-2'"),
        ("(null)", "character 1", "a host name is missing"),
        ("n1 n2", "character 3", "unexpected ' '"),
    ],
)
def test_malformed_host_list_is_refused_with_its_place(text, place, why):
    """Reference section 7, item 16: TF takes a reversed range for an empty one."""
    with pytest.raises(ValueError, match="host list") as error:
        expand_host_list(text)
    assert repr(text) in str(error.value)
    assert f"{place}:" in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2,1,3", [2, 1, 3]), ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]), ("13(x10)", [13] * 10)],
)
def test_tasks_per_node_are_written_out(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("text", "place"),
    [("", 1), ("2,", 3), ("2,x", 3), ("2(x)", 1), ("1,2(3)", 3), ("2(x3", 1), ("-1", 1), ("2 (x3)", 1)],
)
def test_malformed_tasks_per_node_are_refused_with_their_place(text, place):
    with pytest.raises(ValueError, match=f"at character {place}:") as error:
        expand_tasks_per_node(text)
    assert repr(text) in str(error.value)
