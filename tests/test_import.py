"""`import mpidist`: quick, without MPI and CUDA, and with all the names that programs of tf.distribute look for."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from mpi_session import clean_environment

import mpidist

pytestmark = pytest.mark.no_mpi

PROJECT = str(Path(mpidist.__file__).parents[1])


def python(program, **variables):
    """Run a program in a fresh interpreter, outside of any MPI launch, and read what it prints as JSON."""
    environment = {**clean_environment(), "PYTHONPATH": PROJECT, **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_starts_neither_mpi_nor_cuda_and_reads_few_modules_beside_numpy():
    """Each rank of a job reads them from the cluster's file system."""
    program = """
import json, sys, numpy
before = set(sys.modules)
import mpidist
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = python(program)
    assert not {"mpi4py.MPI", "cupy", "cupyx", "ml_dtypes", "sklearn"} & set(loaded)
    assert len(loaded) <= 110
    own = [name for name in loaded if name.startswith("mpidist")]
    assert not [name for name in own if name.split(".")[1:2] in (["checkpoint"], ["datasets"], ["parameter_server"])]


def test_import_from_a_zip(tmp_path):
    shutil.make_archive(str(tmp_path / "packages"), "zip", PROJECT, "mpidist")
    program = """
import json, os, sys
sys.path.insert(0, os.environ["ZIP"])
import mpidist
sum = mpidist.OneDeviceStrategy("/cpu:0").reduce("sum", 3.0)
print(json.dumps([mpidist.__file__, sum, mpidist.ValueContext(1, 2) in {mpidist.ValueContext(1, 2)}]))
"""
    file, total, is_equal = python(program, ZIP=str(tmp_path / "packages.zip"))
    assert (".zip" in file, total, is_equal) == (True, 3.0, False)


def test_import_from_an_editable_installation_beside_its_clone(tmp_path):
    """A finder of setuptools would come too late: Python imports the folder `mpidist`, as a package without a file."""
    clone, environment = tmp_path / "mpidist", clean_environment() | {"PYTHONPATH": ""}
    (clone / "mpidist").mkdir(parents=True)
    (clone / "mpidist/__init__.py").write_text("__version__ = '1'")
    for file in ("setup.cfg", "mpidist_torch.py"):
        shutil.copy(f"{PROJECT}/{file}", clone)
    build = "import setuptools; setuptools.setup(script_args=['-q', 'editable_wheel', '--dist-dir', '..'])"
    subprocess.run([sys.executable, "-c", build], cwd=clone, env=environment, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    program = "import site; site.addsitedir('site'); import mpidist; print(mpidist.__version__)"
    command = [sys.executable, "-S", "-c", program]
    assert subprocess.check_output(command, cwd=tmp_path, env=environment) == b"1\n"


def test_compiled_part_is_there_where_a_compiler_was():
    """A compiler that fails is not noticed otherwise: the part is optional."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which("cc") is None or not headers.exists():
        pytest.skip("there is no C compiler with Python's headers")
    assert import_module("mpidist.transport.native._native").combines("sum", np.dtype(np.float32))


def test_names_for_type_checkers_are_those_of_the_package():
    stub = ast.parse((Path(mpidist.__file__).with_suffix(".pyi")).read_text())
    named = {
        alias.asname: getattr(import_module(str(node.module)), alias.name, None)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert named.keys() == set(mpidist.__all__) <= set(dir(mpidist))
    assert {name for name, found in named.items() if found is not getattr(mpidist, name)} == set()


def test_one_process_needs_no_mpi():
    """The default strategy and OneDeviceStrategy, also with variables and data sets; nor do imports of any module."""
    program = """
import sys, json, numpy, mpidist, mpidist.transport.mpi.launch
import mpidist.experimental.partitioners  # as programs of tf.distribute do
from mpidist.experimental.server_rules import Adam
def train(strategy):
    with strategy.scope():
        variable = mpidist.Variable(1.0, aggregation="SUM")
        for batch in strategy.experimental_distribute_dataset([numpy.ones(3)] * 2):
            strategy.run(lambda: variable.assign_add(batch.sum()))
    return float(strategy.reduce("MEAN", variable.read_value()))
with mpidist.OneDeviceStrategy("/cpu:0") as one:
    print(json.dumps([train(mpidist.get_strategy()), train(one), "mpi4py.MPI" in sys.modules]))
"""
    assert python(program, MPI4PY_LIBMPI="/nonexistent/libmpi.so") == [7.0, 7.0, False]


UNAVAILABLE = """
import json, sys
{before}
import mpidist
said = []
for make in (mpidist.MirroredStrategy, mpidist.MultiWorkerMirroredStrategy, mpidist.NcclAllReduce().bind):
    try:
        make()
    except mpidist.errors.UnavailableError as error:
        said.append(str(error))
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("before", "variables"),
    [("", {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}), ("sys.modules['mpi4py'] = None  # not installed", {})],
    ids=["no MPI library", "no mpi4py"],
)
def test_strategy_without_mpi_names_the_package(before, variables):
    said = python(UNAVAILABLE.format(before=before), **variables)
    assert len(said) == 3
    for text in said:
        assert re.search(r"pip install [\w ]*mpich", text)
        assert "MPI4PY_LIBMPI" in text


NAMES = """
ReduceOp CommunicationOptions CommunicationImplementation CollectiveHints CollectiveCommunication ValueContext
CrossDeviceOps ReductionToOneDevice NcclAllReduce HierarchicalCopyAllReduce CollectiveAllReduce
OneDeviceStrategy MirroredStrategy MultiWorkerMirroredStrategy CentralStorageStrategy ParameterServerStrategy
Strategy StrategyExtended ReplicaContext get_strategy has_strategy get_replica_context in_cross_replica_context
experimental_set_strategy get_loss_reduction
Server ShardedVariable partitioners.FixedShardsPartitioner
partitioners.MinSizePartitioner partitioners.MaxSizePartitioner
server_rules.SGD server_rules.Momentum server_rules.Adam server_rules.Registered server_rules.register
coordinator.ClusterCoordinator coordinator.RemoteValue coordinator.register
checkpoint.PreemptionCheckpointHandler
DistributedValues PerReplica Mirrored IndexedSlices DistributedDataset InputContext InputReplicationMode InputOptions
AutoShardPolicy Files
Variable VariableSynchronization VariableAggregation
cluster_resolver.ClusterSpec cluster_resolver.ClusterResolver cluster_resolver.SimpleClusterResolver
cluster_resolver.TFConfigClusterResolver cluster_resolver.SlurmClusterResolver cluster_resolver.MPIClusterResolver
cluster_resolver.UnionResolver
errors.DeadlineExceededError errors.InvalidArgumentError errors.PeerFailedError errors.UnavailableError
errors.TopologyError errors.InvalidTypeError
"""


def named(path):
    found = mpidist
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_names_of_the_contract_are_there_and_listed():
    for name in NAMES.split():
        parent, _, last = name.rpartition(".")
        assert last in (named(parent) if parent else mpidist).__all__, name
        assert (named(name).__doc__ or "").strip(), name


def test_names_of_experimental_are_aliases():
    modules = ("coordinator", "partitioners", "server_rules")
    for name in set(mpidist.experimental.__all__) - set(modules):
        home = mpidist.checkpoint if name == "PreemptionCheckpointHandler" else mpidist
        assert getattr(home, name) is getattr(mpidist.experimental, name)
    for module in modules:
        assert named(f"experimental.{module}").__all__ == named(module).__all__
        for name in named(module).__all__:
            assert named(f"experimental.{module}.{name}") is named(f"{module}.{name}")
    assert mpidist.CollectiveCommunication is mpidist.CommunicationImplementation


ABSENT = {
    "TPUStrategy": "not on TPUs; see the page 'From tf.distribute'",
    "experimental.TPUStrategy": "mpidist.experimental has no TPUStrategy: .*TPUs",
    "RunOptions": "`run` takes none",
    "experimental.TerminationConfig": "arguments of PreemptionCheckpointHandler",
    "cluster_resolver.TPUClusterResolver": "TPUs",
    "cluster_resolver.GCEClusterResolver": "leave the resolver out",
    "cluster_resolver.UnionClusterResolver": "its name is UnionResolver",
    "experimental.PreemptionWatcher": "PreemptionCheckpointHandler watches",
    "PreemptionCheckpointHandler": r"did you mean mpidist\.experimental\.PreemptionCheckpointHandler\?$",
    "experimental.MirroredStrategy": r"did you mean mpidist\.MirroredStrategy\?$",
    "MirorredStrategy": r"module 'mpidist' has no attribute 'MirorredStrategy'; did you mean mpidist\.Mirrored",
    "allreduce": r"has no allreduce: call strategy\.reduce.*; see the page 'From Horovod, DDP and mpi4py'",
    "broadcast": r"has no attribute 'broadcast': it is strategy\.broadcast",
    "bogus": "^module 'mpidist' has no attribute 'bogus'$",
    "_private": "^module 'mpidist' has no attribute '_private'$",
}


def test_absent_names_raise_with_advice():
    """To `hasattr` they are not there, and nobody lists them."""
    for path, text in ABSENT.items():
        parent, _, last = path.rpartition(".")
        module = named(parent) if parent else mpidist
        with pytest.raises(AttributeError, match=text):
            named(path)
        assert not hasattr(module, last)
        assert last not in dir(module)


def test_absent_members_raise_with_advice():
    strategy = mpidist.OneDeviceStrategy()
    for owner, name, text in (
        (strategy, "unwrap", "its name is experimental_local_results; see the page 'From tf.distribute'"),
        (strategy, "make_dataset_iterator", "iterate over the data set of experimental_distribute_dataset"),
        (strategy, "experimental_run_v2", "its name is run"),
        (strategy, "all_reduce", "a method of mpidist.get_replica_context"),
        (strategy, "world_size", r"it is strategy\.size; see the page 'From Horovod, DDP and mpi4py'"),
        (strategy, "rnk", "no attribute 'rnk'$"),
        (strategy.extended, "read_var", "call read_value"),
        (strategy.extended, "should_checkpoint", "strategy.is_chief"),
        (mpidist.Server({"worker": ["a"]}, "worker", 0), "target", "a server has no address"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(owner, name)
        assert not hasattr(owner, name)


def test_collective_all_reduce_refuses_old_arguments_with_advice():
    for name in ("num_workers", "num_gpus_per_worker", "all_reduce_merge_scope", "group_size", "communication"):
        with pytest.raises(TypeError, match=f"CollectiveAllReduce has no argument {name}: .*From tf.distribute"):
            mpidist.CollectiveAllReduce(**{name: 1})


def test_libraries_see_the_face_of_tf_distribute_alone():
    def public(thing):
        return " ".join(name for name in dir(thing) if not name.startswith("_"))

    assert public(mpidist.OneDeviceStrategy().extended) == (
        "batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with parameter_devices reduce_to update "
        "value_container variable_created_in_scope worker_devices"
    )
    for kind in (mpidist.CollectiveAllReduce, mpidist.ReductionToOneDevice, mpidist.NcclAllReduce):
        assert public(kind()) == "batch_reduce bind broadcast close reduce"


def test_modules_show_their_public_names_and_their_parts():
    """`dir` and `import *`."""
    names = ("coordinator", "partitioners", "server_rules")
    homes = [mpidist, mpidist.cluster_resolver, mpidist.experimental]
    for home in homes + [named(path) for name in names for path in (name, f"experimental.{name}")]:
        shown = {name for name in dir(home) if not name.startswith("_")}
        parts = {name for name in shown if f"{home.__name__}.{name}" in sys.modules}
        assert shown - parts <= set(home.__all__) <= shown
        starred = {}
        exec(f"from {home.__name__} import *", starred)
        assert set(starred) - {"__builtins__"} == set(home.__all__)


def test_members_of_the_enumerations_are_those_of_the_contract():
    members = {
        "ReduceOp": "SUM MEAN MIN MAX PROD",
        "CommunicationImplementation": "AUTO RING NCCL",
        "VariableSynchronization": "AUTO NONE ON_WRITE ON_READ",
        "VariableAggregation": "NONE SUM MEAN ONLY_FIRST_REPLICA",
        "InputReplicationMode": "PER_WORKER PER_REPLICA",
        "AutoShardPolicy": "OFF AUTO FILE DATA HINT",
    }
    for name, its in members.items():
        assert [member.name for member in named(name)] == its.split()


def test_errors_are_of_the_built_in_kinds_that_programs_catch():
    errors = mpidist.errors
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.PeerFailedError, ConnectionError)
    assert issubclass(errors.UnavailableError, RuntimeError)
    assert issubclass(errors.TopologyError, RuntimeError)


SIGNATURES = """
CommunicationOptions(bytes_per_pack=, timeout_seconds=, implementation=, *, reproducible=, compression=, \
compress_everywhere=)
CollectiveHints(bytes_per_pack=, timeout_seconds=)
ReductionToOneDevice(reduce_to_device=, accumulation_fn=)
NcclAllReduce(num_packs=)
HierarchicalCopyAllReduce(num_packs=)
CollectiveAllReduce(options=)
OneDeviceStrategy(device=)
CentralStorageStrategy(compute_devices=, parameter_device=, *, communication_options=, comm=)
ParameterServerStrategy(cluster_resolver=, variable_partitioner=, *, num_ps=, ps_ranks=, staleness=, \
on_worker_lost=, placement=, communication_options=, replicas=, comm=)
Server(cluster_or_strategy, job_name=, task_index=, protocol=, config=, start=)
coordinator.ClusterCoordinator(strategy)
coordinator.ClusterCoordinator.schedule(self, fn, args=, kwargs=)
coordinator.ClusterCoordinator.join(self)
coordinator.ClusterCoordinator.done(self)
coordinator.ClusterCoordinator.fetch(self, val)
coordinator.ClusterCoordinator.create_per_worker_dataset(self, dataset_fn)
partitioners.FixedShardsPartitioner(num_shards)
partitioners.MinSizePartitioner(min_shard_bytes=, max_shards=, bytes_per_string=)
partitioners.MaxSizePartitioner(max_shard_bytes, max_shards=, bytes_per_string=)
MirroredStrategy(devices=, cross_device_ops=, *, communication_options=, replicas=, comm=, per_node_variables=)
MultiWorkerMirroredStrategy(cluster_resolver=, communication_options=, *, cross_device_ops=, replicas=, comm=, \
per_node_variables=, on_rank_lost=)
Batches(data, batch_size, *, seed=, drop_remainder=)
Batches.iter_from(self, epoch, num_samples)
Batches.unread_from(self, epoch, num_samples)
Files(names, read, *, seed=)
Files.iter_from(self, epoch, num_samples)
Files.order(self, epoch)
Files.shard(self, num_shards, index)
InputOptions(experimental_fetch_to_device=, experimental_replication_mode=, experimental_place_dataset_on_device=, \
experimental_per_replica_buffer_size=, auto_shard_policy=)
DistributedDataset.state_dict(self)
DistributedDataset.load_state_dict(self, state)
DistributedDataset.require_fitting(self, state)
DistributedIterator.state_dict(self)
DistributedIterator.load_state_dict(self, state)
DistributedIterator.require_fitting(self, state)
Strategy.scope(self)
Strategy.run(self, fn, args=, kwargs=, options=)
Strategy.reduce(self, reduce_op, value, axis=, options=, *, weight=, out=, experimental_hints=)
Strategy.barrier(self)
Strategy.broadcast(self, value, root=, *, out=)
Strategy.broadcast_object(self, obj, root=, *, pickle=)
Strategy.gather_object(self, obj, *, pickle=)
Strategy.gather(self, value, axis)
Strategy.experimental_local_results(self, value)
Strategy.experimental_distribute_values_from_function(self, value_fn)
Strategy.experimental_distribute_dataset(self, dataset, options=)
Strategy.distribute_datasets_from_function(self, dataset_fn, options=)
Strategy.symmetric_empty(self, shape, dtype, *, per_node=)
Strategy.symmetric_empty_like(self, value, *, per_node=)
Strategy.raise_together(self, what=)
Strategy.trace(self, folder)
Strategy.reset(self)
Strategy.close(self)
ReplicaContext.all_reduce(self, reduce_op, value, options=, *, weight=, out=, experimental_hints=)
ReplicaContext.start_all_reduce(self, reduce_op, value, options=, *, out=)
ReplicaContext.reduce_scatter(self, reduce_op, value, axis=, options=, *, out=)
ReplicaContext.all_gather(self, value, axis, options=, *, out=, experimental_hints=)
ReplicaContext.merge_call(self, merge_fn, args=, kwargs=)
StrategyExtended.reduce_to(self, reduce_op, value, destinations, options=, *, experimental_hints=)
StrategyExtended.batch_reduce_to(self, reduce_op, value_destination_pairs, options=, *, experimental_hints=)
StrategyExtended.broadcast_to(self, value, destinations)
StrategyExtended.update(self, var, fn, args=, kwargs=, group=)
StrategyExtended.call_for_each_replica(self, fn, args=, kwargs=)
StrategyExtended.colocate_vars_with(self, var)
StrategyExtended.value_container(self, value)
StrategyExtended.variable_created_in_scope(self, v)
CrossDeviceOps.bind(self, comm=)
CrossDeviceOps.reduce(self, reduce_op, per_replica_value, destinations, options=, *, out=, experimental_hints=)
CrossDeviceOps.batch_reduce(self, reduce_op, value_destination_pairs, options=, *, experimental_hints=)
CrossDeviceOps.broadcast(self, tensor, destinations, *, root=, out=)
CrossDeviceOps.close(self)
PerReplica.__init__(self, values)
IndexedSlices(values, indices, dense_shape=)
Variable.assign(self, value, use_locking=, name=, read_value=)
Variable.assign_add(self, delta, use_locking=, name=, read_value=)
Variable.assign_sub(self, delta, use_locking=, name=, read_value=)
Variable.scatter_add(self, sparse_delta, use_locking=, name=)
Variable.scatter_update(self, sparse_delta, use_locking=, name=)
InputContext(num_input_pipelines=, input_pipeline_id=, num_replicas_in_sync=)
InputContext.get_per_replica_batch_size(self, global_batch_size)
"""


def shown(path):
    """Write a signature as in the list: which arguments have defaults, which are named only."""
    words = []
    for parameter in inspect.signature(named(path)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name + "=" * (parameter.default is not parameter.empty))
    return f"{path}({', '.join(words)})"


def test_signatures_are_those_of_the_contract():
    listed = SIGNATURES.strip().splitlines()
    assert [shown(signature.partition("(")[0]) for signature in listed] == listed


def test_properties_of_the_contract_are_there():
    kinds = {
        mpidist.Strategy: "num_replicas_in_sync cluster_resolver extended topology is_chief "
        "rank size local_rank local_size node",
        mpidist.StrategyExtended: "worker_devices parameter_devices",
    }
    for kind, names in kinds.items():
        assert all(isinstance(inspect.getattr_static(kind, name), property) for name in names.split())
