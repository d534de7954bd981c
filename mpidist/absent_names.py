"""Names of tf.distribute that mpidist lacks: why, and what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NoReturn

__all__ = ["explain_absent_names"]

_MODULES: Final = ("mpidist", "mpidist.experimental", "mpidist.cluster_resolver")
_PAGE: Final = "see the page 'From tf.distribute' of the documentation"

_NO_TPUS: Final = "mpidist runs on CPUs and GPUs, not on TPUs"
_CLOUD: Final = "a launcher of MPI, such as mpiexec or srun, says who takes part: leave the resolver out"
_WHY: Final[Mapping[str, str]] = {
    "CollectiveAllReduceStrategy": "an old name of MultiWorkerMirroredStrategy",
    "GCEClusterResolver": _CLOUD,
    "KubernetesClusterResolver": _CLOUD,
    "RunOptions": "its options are for TPUs; `run` takes none",
    "SageMakerClusterResolver": _CLOUD,
    "TPUClusterResolver": _NO_TPUS,
    "TPUStrategy": _NO_TPUS,
    "TerminationConfig": "its options are arguments of PreemptionCheckpointHandler",
    "UnionClusterResolver": "its name is UnionResolver",
    "rpc": "ranks call collectives; mpi4py sends anything else",
}


def explain_absent_names(module: str) -> None:
    """Give a module a `__getattr__` whose `AttributeError` says why a name is absent.

    The function is set at run time, because a type checker accepts any name of a module that defines `__getattr__`.

    Args:
        module: The module's name. The module calls this while it is imported.
    """

    def look_up(name: str) -> NoReturn:
        raise AttributeError(_text_of(module, name))

    vars(sys.modules[module])["__getattr__"] = look_up


def _text_of(module: str, name: str) -> str:
    if name in _WHY:
        return f"{module} has no {name}: {_WHY[name]}; {_PAGE}"
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return text
    listed = {public: home for home in reversed(_MODULES) for public in sys.modules[home].__all__}
    near = [name] if name in listed else get_close_matches(name, listed, 1, cutoff=0.8)
    return f"{text}; did you mean {listed[near[0]]}.{near[0]}?" if near else text
