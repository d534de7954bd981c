"""The names of packages: imported at their first use, or absent, with the reason and what to use instead.

Every rank of a job imports mpidist, often from a shared file system: so unused modules are not read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NoReturn, TypeVar

__all__ = ["define_names", "explain_absent_arguments", "explain_absent_members"]

_Class = TypeVar("_Class", bound=type)
_Init = TypeVar("_Init", bound=Callable[..., None])

_MODULES: Final = ("mpidist", "mpidist.experimental", "mpidist.cluster_resolver")
_PAGE: Final = "see the page 'From tf.distribute' of the documentation"

_NO_TPUS: Final = "mpidist runs on CPUs and GPUs, not on TPUs"
_CLOUD: Final = "a launcher of MPI, such as mpiexec or srun, starts the ranks: leave the resolver out"
_NO_GRAPH: Final = "Python runs the program, without a graph or session"
_IN_RUN: Final = "it is a method of mpidist.get_replica_context(), in the function of run"
_INPUT: Final = "iterate over the data set of experimental_distribute_dataset or distribute_datasets_from_function"
_OPTIMIZER: Final = "keep an optimizer's state in a Variable, and change it by update"
_CHIEF: Final = "check strategy.is_chief"

_WHY: Final[Mapping[str, str]] = {
    "AllReduceCrossDeviceOps": "choose NcclAllReduce or HierarchicalCopyAllReduce",
    "CollectiveAllReduceStrategy": "an old name of MultiWorkerMirroredStrategy",
    "GCEClusterResolver": _CLOUD,
    "KubernetesClusterResolver": _CLOUD,
    "MultiWorkerAllReduce": "choose HierarchicalCopyAllReduce",
    "PreemptionWatcher": "PreemptionCheckpointHandler watches for the signal, and saves",
    "ReductionToOneDeviceCrossDeviceOps": "an old name of ReductionToOneDevice",
    "RunOptions": "its options are for TPUs; `run` takes none",
    "SageMakerClusterResolver": _CLOUD,
    "TPUClusterResolver": _NO_TPUS,
    "TPUStrategy": _NO_TPUS,
    "TerminationConfig": "its options are arguments of PreemptionCheckpointHandler",
    "UnionClusterResolver": "its name is UnionResolver",
    "rpc": "ranks call collectives; mpi4py sends anything else",
}
# By the name of the class.
_WHY_NO_MEMBER: Final[Mapping[str, Mapping[str, str]]] = {
    "Strategy": {
        "all_gather": f"{_IN_RUN}; across replicas call gather",
        "all_reduce": f"{_IN_RUN}; across replicas call reduce",
        "configure": _NO_GRAPH,
        "experimental_distribute_datasets_from_function": "its name is distribute_datasets_from_function",
        "experimental_make_numpy_dataset": "distribute mpidist.Batches(arrays, batch_size)",
        "experimental_run": "its name is run",
        "experimental_run_v2": "its name is run",
        "make_dataset_iterator": _INPUT,
        "make_input_fn_iterator": _INPUT,
        "merge_call": _IN_RUN,
        "reduce_scatter": f"{_IN_RUN}; across replicas call reduce",
        "unwrap": "its name is experimental_local_results",
        "update_config_proto": _NO_GRAPH,
    },
    "StrategyExtended": {
        "experimental_between_graph": _NO_GRAPH,
        "experimental_require_static_shapes": _NO_GRAPH,
        "experimental_run_steps_on_iterator": "call strategy.run for each batch, in a loop of Python",
        "experimental_should_init": _CHIEF,
        "non_slot_devices": _OPTIMIZER,
        "read_var": "call read_value() of the variable",
        "should_checkpoint": _CHIEF,
        "should_save_summary": _CHIEF,
        "update_non_slot": _OPTIMIZER,
    },
    "Server": {
        "server_def": "the cluster is what the constructor was given",
        "start": "the server begins with join()",
        "target": "ranks send messages of MPI, so a server has no address",
    },
}
_SUM: Final = "call strategy.reduce(op, value), or all_reduce of the replica context in run"
# Of Horovod, torch.distributed, Accelerate and mpi4py, where they are modules or strategies.
_PORTED: Final[Mapping[str, str]] = {
    "DistributedDataParallel": 'torch.distributed.init_process_group("mpidist") runs that of PyTorch',
    "DistributedOptimizer": "call all_reduce in the step, before optimizer.step()",
    "all_reduce": _SUM,
    "allgather": "call strategy.gather(value, axis)",
    "allreduce": _SUM,
    "broadcast_parameters": "call strategy.broadcast(tensors, out=tensors)",
    "get_rank": "it is strategy.rank",
    "get_world_size": "it is strategy.size",
    "init": "make a MultiWorkerMirroredStrategy",
    "init_process_group": 'make a MultiWorkerMirroredStrategy, or call that of torch.distributed with "mpidist"',
    "is_main_process": "it is strategy.is_chief",
    "shutdown": "call strategy.close()",
    "world_size": "it is strategy.size",
}
_PORTED_PAGE: Final = "see the page 'From Horovod, DDP and mpi4py' of the documentation"

_NOT_NEEDED: Final = "MPI numbers the ranks and matches their calls: leave it out"
_WHY_NO_ARGUMENT: Final[Mapping[str, str]] = {
    "all_reduce_merge_scope": "options=CommunicationOptions(bytes_per_pack=...) groups arrays",
    "collective_keys": _NOT_NEEDED,
    "communication": "options=CommunicationOptions(implementation=...) takes it",
    "devices": _NOT_NEEDED,
    "group_size": _NOT_NEEDED,
    "num_gpus_per_worker": _NOT_NEEDED,
    "num_workers": _NOT_NEEDED,
}


def define_names(package: str, stub: str = "") -> list[str]:
    """Give a package a `__getattr__` that imports names at their first use, and explains absent ones (PEP 562).

    `stub` is the text of the package's stub, whose lines are `from home import name as name`; the names in it are
    returned. Modules of the package are imported without being named. The function is set at run time, while the
    package is imported, because a type checker accepts any name of a module that defines `__getattr__`.
    """
    lines = (line.split() for line in stub.splitlines() if line.startswith("from "))
    named = {name: home for _, home, _, name, *_ in lines}
    homes = {name: home for name, home in named.items() if home != package}
    scope = vars(sys.modules[package])

    def look_up(name: str) -> Any:
        if name in homes:
            found = getattr(import_module(homes[name]), name)
        elif not name.startswith("__") and find_spec(f"{package}.{name}"):
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(_text_of(package, name))
        scope[name] = found
        return found

    scope["__getattr__"] = look_up
    scope["__dir__"] = lambda: sorted({*scope, *homes})
    return list(named)


def explain_absent_members(kind: _Class) -> _Class:
    """Give a class a `__getattr__` whose `AttributeError` explains why a member is absent. A decorator of classes."""
    why = _WHY_NO_MEMBER[kind.__name__]

    def look_up(self: object, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}{_reason(name, why)}"
        raise AttributeError(text, name=name, obj=self)

    type.__setattr__(kind, "__getattr__", look_up)
    return kind


def explain_absent_arguments(init: _Init) -> _Init:
    """Let a constructor refuse arguments of earlier releases of tf.distribute by name. A decorator of `__init__`."""

    @wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        for name in _WHY_NO_ARGUMENT.keys() & kwargs:
            raise TypeError(f"{type(self).__name__} has no argument {name}: {_WHY_NO_ARGUMENT[name]}; {_PAGE}")
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def _reason(name: str, why: Mapping[str, str]) -> str:
    if name in why:
        return f": {why[name]}; {_PAGE}"
    return f": {_PORTED[name]}; {_PORTED_PAGE}" if name in _PORTED else ""


def _text_of(module: str, name: str) -> str:
    if reason := _reason(name, _WHY):
        return f"{module} has no {name}{reason}"
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return text
    if hasattr(import_module("mpidist.strategy").Strategy, name):
        return f"{text}: it is strategy.{name}, of a strategy such as MultiWorkerMirroredStrategy()"
    listed = {public: home for home in reversed(_MODULES) for public in import_module(home).__all__}
    near = [name] if name in listed else get_close_matches(name, listed, 1, cutoff=0.8)
    return f"{text}; did you mean {listed[near[0]]}.{near[0]}?" if near else text
