"""Print what mpidist sees here: MPI, ranks and nodes, shared memory, GPUs, NCCL, and what to do about what is missing.

Start it as you start your jobs, with as many ranks on as many nodes, or alone:

    mpirun -n 4 python -m mpidist doctor

It changes nothing. The exit status is 0, whatever is missing but MPI; ranks that cannot work together are an error,
as they are in a job.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy

import mpidist
from mpidist.cli.cuda_aware_mpi import child_command, hint, prove
from mpidist.cluster_resolver import TFConfigClusterResolver
from mpidist.errors import TopologyError, UnavailableError
from mpidist.transport import (
    GpuFacts,
    SyncGroup,
    count_text,
    cuda,
    first_line,
    load_mpi,
    name_placement,
    name_ranks,
    nccl_version_text,
    read_boot_id,
    reason_against_nccl,
)

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME: Final = "doctor"
HELP: Final = "print what mpidist sees here, and what to do about what is missing"

# A variable that a launcher sets, and the launcher; the first variable that is set counts.
_LAUNCHERS: Final = (
    ("PMI_RANK", "an mpiexec of MPICH or its kin"),
    ("OMPI_COMM_WORLD_RANK", "mpiexec of Open MPI"),
    ("MV2_COMM_WORLD_RANK", "mpiexec of MVAPICH"),
    ("PMIX_RANK", "a launcher with PMIx"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def run(arguments: argparse.Namespace) -> int:
    """Gather what each rank sees, and let the first rank print it. Collective."""
    try:
        load_mpi()
    except UnavailableError as error:
        print(f"MPI:   {error}")
        print(f"GPUs:  {_gpus(cuda.current())}")
        return 1
    group = SyncGroup.from_mpi(None)
    try:
        topology = group.topology
        comm = load_mpi().COMM_WORLD
        reports = comm.allgather(_Report.here(group))
        if topology.rank == 0:
            print("\n".join(_lines(group, reports)), flush=True)
        return 0
    finally:
        group.close()


@final
@dataclass(frozen=True)
class _Report:
    """What one rank sees.

    Attributes:
        software: Versions, by name.
        cluster: Which task of a cluster the environment says the rank is; "" if it says nothing.
        gpus: The GPUs that the rank may use; or why there are none.
        nccl: The version of NCCL; or why NCCL cannot be used.
        device_mpi: Whether MPI takes device memory, and why; "" on ranks that are not the first of their node.
        facts: The facts about the rank's GPU that decide on NCCL.
    """

    software: tuple[tuple[str, str], ...]
    cluster: str
    gpus: str
    nccl: str
    device_mpi: str
    facts: GpuFacts

    @classmethod
    def here(cls, group: SyncGroup) -> _Report:
        topology, provider = group.topology, cuda.current()
        support = provider.support
        hostname = topology.hostnames[topology.rank]
        software = (
            ("mpidist", f"{mpidist.__version__}, Python {sys.version.split()[0]}, NumPy {numpy.__version__}"),
            ("MPI", " ".join(load_mpi().Get_library_version().rstrip("\0").splitlines()[0].split())),
            ("launcher", _launcher(os.environ)),
            ("CuPy", support.cupy_version or "none"),
        )
        facts = GpuFacts.here(provider, os.environ, hostname, read_boot_id())
        nccl = facts.reason or nccl_version_text(support.nccl_version)
        device_mpi = _device_mpi(provider, group.settings.device_mpi) if topology.is_leader else ""
        return cls(software, _cluster(os.environ), _gpus(provider), nccl, device_mpi, facts)


def _lines(group: SyncGroup, reports: Sequence[_Report]) -> list[str]:
    topology = group.topology
    lines = [f"{name_placement(topology.node_sizes)}."]
    for node, ranks in enumerate(topology.nodes):
        lines += ["", f"Node {node} ({topology.hostnames[ranks[0]]}): {name_ranks(ranks)}"]
        for title, texts in _rows(group, reports, ranks):
            lines += [f"  {title + ':':<20}{line}" for line in _by_rank(texts, ranks)]
    lines += ["", f"Within nodes, host memory:     {_host_memory(group)}"]
    lines += [f"Within nodes, device memory:   {_device_memory(group, reports)}"]
    return lines


def _rows(group: SyncGroup, reports: Sequence[_Report], ranks: Sequence[int]) -> list[tuple[str, list[str]]]:
    chosen = [reports[rank] for rank in ranks]
    rows = [(title, [report.software[at][1] for report in chosen]) for at, (title, _) in enumerate(chosen[0].software)]
    if any(report.cluster for report in reports):
        rows.append(("cluster", [report.cluster or "none described" for report in chosen]))
    rows.append(("GPUs", [report.gpus for report in chosen]))
    rows.append(("NCCL", [report.nccl for report in chosen]))
    rows.append(("MPI on GPU memory", [chosen[0].device_mpi] * len(chosen)))
    return rows


def _by_rank(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """List a text that is the same on all ranks of a node once; else each text with its ranks."""
    if len(set(texts)) == 1:
        return [texts[0]]
    return [
        f"{name_ranks([rank for rank, of_rank in zip(ranks, texts, strict=True) if of_rank == text])}: {text}"
        for text in dict.fromkeys(texts)
    ]


def _launcher(environ: Mapping[str, str]) -> str:
    found = [text for name, text in _LAUNCHERS if name in environ][:1]
    if "SLURM_STEP_ID" in environ:
        found.append(f"in step {environ['SLURM_STEP_ID']} of Slurm's job {environ.get('SLURM_JOB_ID', '?')}")
    return ", ".join(found) or "none: this process was started alone"


def _cluster(environ: Mapping[str, str]) -> str:
    if environ.get("TF_CONFIG"):
        try:
            resolver = TFConfigClusterResolver(environ=environ)
            spec = resolver.cluster_spec()
            jobs = ", ".join(count_text(spec.num_tasks(job), f"{job} task") for job in spec.jobs)
            return f"{resolver.task_type} {resolver.task_id} of {jobs}, says TF_CONFIG"
        except (TypeError, ValueError) as error:  # the error of a job
            return f"refused: {error}"
    components = environ.get("SLURM_HET_SIZE")
    if not components:
        return ""
    advice = "SlurmClusterResolver(component_jobs=[...]) says what their tasks are"
    return f"a heterogeneous job of Slurm with {components} components; {advice}"


def _gpus(provider: cuda.Cuda) -> str:
    count = provider.support.num_devices
    if not count:
        return f"none; {provider.support.reason}"
    names = [_gpu_name(provider.cupy.cuda.runtime, index) for index in range(count)]
    drivers = provider.support.driver_version
    return f"{count} ({', '.join(dict.fromkeys(names))}), driver for CUDA {drivers // 1000}.{drivers // 10 % 100}"


def _gpu_name(runtime: Any, index: int) -> str:
    try:
        name = runtime.getDeviceProperties(index).get("name", "unknown")
    except RuntimeError as error:
        return f"does not answer: {first_line(error)}"
    return name.decode() if isinstance(name, bytes) else str(name)


def _device_mpi(provider: cuda.Cuda, is_allowed: bool) -> str:
    """Say whether MPI takes device memory. Starts a child process, where MPI says yes."""
    answer = hint()
    if answer.works and provider.support.num_devices:
        answer = prove(child_command(int(provider.cupy.cuda.runtime.getDevice())))
    elif answer.works:
        return f"perhaps: {answer.reason}, but there is no GPU to try"
    if not answer.works:
        return f"no: {answer.reason}; " + (
            "unset MPIDIST_DEVICE_MPI" if is_allowed else "device memory goes through the host"
        )
    return f"yes: {answer.reason}; " + (
        "used, as MPIDIST_DEVICE_MPI=1 says so"
        if is_allowed
        else "MPIDIST_DEVICE_MPI=1 on all ranks uses that between nodes"
    )


def _host_memory(group: SyncGroup) -> str:
    if group.topology.size == 1:
        return "one rank, which shares with nobody"
    if group.levels.fused is None:
        return "messages of MPI; see the warning above on what is wrong with shared memory"
    return "shared memory"


def _device_memory(group: SyncGroup, reports: Sequence[_Report]) -> str:
    topology = group.topology
    if topology.size == 1:
        return "one rank, which sends to nobody"
    if not group.settings.nccl:
        return "through the host: MPIDIST_NCCL=0 asks to do without NCCL"
    groups = [ranks for ranks in topology.nodes if len(ranks) > 1]
    if not groups:
        return "one rank on each node, which sends to nobody there"
    try:
        reason = reason_against_nccl([report.facts for report in reports], groups, topology.hostnames)
    except (TopologyError, UnavailableError) as error:  # the error of a job's first call
        return f"refused: {error}"
    return f"through the host: {reason}" if reason else "NCCL"
