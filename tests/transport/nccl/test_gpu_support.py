"""What is found of CuPy and NCCL, and whether ranks can use them together: tables, and no MPI."""

import re
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpidist.errors import TopologyError
from mpidist.transport.cuda import Cuda
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl

pytestmark = pytest.mark.no_mpi


class CudaError(RuntimeError):
    """As CuPy's."""


def modules(count=2, version="14.2.0", nccl=22809, available=True):
    """Make what `Cuda` imports."""

    def device_count():
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: 12090, driverGetVersion=lambda: 13000, getDeviceCount=device_count,
        getDevice=lambda: 1,
    )  # fmt: skip
    has_gpu = isinstance(count, int) and count > 0
    binding = SimpleNamespace(available=available, get_version=lambda: nccl)
    its = SimpleNamespace(
        is_available=lambda: has_gpu, runtime=runtime, nccl=binding,
        Device=lambda index: SimpleNamespace(pci_bus_id=f"0000:0{index}:00.0"),
    )  # fmt: skip
    return SimpleNamespace(__version__=version, cuda=its)


def found(monkeypatch, cupy):
    """Return what looks at these modules."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy and cupy.cuda)
    return Cuda()


@pytest.mark.parametrize(
    ("cupy", "reason"),
    [
        (None, "CuPy is not installed; `pip install .cupy-cuda13x.ctk.. nvidia-nccl-cu13`"),
        (modules(version="13.4.1"), "CuPy 13.4.1 is too old; version 14 or later is needed"),
        (modules(CudaError("cudaErrorInsufficientDriver: too old")), "cudaErrorInsufficientDriver.*nvidia-smi"),
        (modules(0), "CuPy finds no GPU: CUDA_VISIBLE_DEVICES='' hides all but 0"),
        (modules(0), "CuPy finds no GPU: the driver shows 0"),
        (modules(available=False), "libnccl.so.2, is not found; `pip install nvidia-nccl-cu12`"),
        (modules(nccl=22105), "NCCL 2.21.5 is older than 2.22.3"),
        (modules(), "^$"),
    ],
)
def test_gpu_support_names_missing_parts_and_remedy(cupy, reason, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if "hides" not in reason:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    its = found(monkeypatch, cupy)
    assert re.search(reason, its.support.reason)
    assert reason != "^$" or (its.support.num_devices, its.support.nccl_version) == (2, 22809)
    assert its.support is its.support, "looking is done once"


def test_gpu_support_gives_the_import_error_of_cupy(monkeypatch, tmp_path):
    error = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "cupy.py").write_text(f"import warnings; warnings.warn('no'); raise ImportError({error!r} + '\\nmore')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        assert Cuda().support.reason == f"CuPy cannot be imported: {error}"
    assert not warned


GOOD = GpuFacts(("n1", "0000:01:00.0"), 22809)
OTHER = replace(GOOD, gpu=("n1", "0000:02:00.0"))
HOSTS = ["n1", "n1", "n2", "n2"]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ([GOOD, OTHER], ""),
        ([GOOD, GOOD], "ranks 0-1 share GPU 0000:01:00.0 of n1"),
        ([GOOD, replace(GOOD, gpu=("x", GOOD.gpu[1]))], ""),  # NCCL_HOSTID makes two hosts of one
        ([replace(GOOD, shares_gpus=True)] * 2, ""),
        ([replace(GOOD, shares_gpus=True), GOOD], "share GPU"),
        ([GOOD, replace(OTHER, reason="it has none")], "rank 1 .n1.: it has none"),
    ],
)
def test_ranks_need_a_gpu_each(facts, reason):
    found = reason_against_nccl(facts, [range(2)], HOSTS)
    assert re.search(reason, found)
    assert bool(found) == bool(reason)


def test_versions_must_agree_where_ranks_meet():
    facts = [GOOD, OTHER, *(replace(GOOD, gpu=("n2", gpu), nccl_version=23004) for gpu in "ab")]
    assert reason_against_nccl(facts, [[0, 1], [2, 3]], HOSTS) == ""
    with pytest.raises(TopologyError, match=r"one version .*: 2.28.9 on ranks 0-1 \(n1\), 2.30.4 on ranks 2-3 \(n2\)"):
        reason_against_nccl(facts, [range(4)], HOSTS)


def test_facts_are_read_from_the_process(monkeypatch):
    its = found(monkeypatch, modules())
    environ = {"NCCL_HOSTID": "h", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    facts = GpuFacts.here(its, environ, "n1")
    assert facts == GpuFacts(("h", "0000:01:00.0"), 22809, False)  # 2.28 shares none
    assert GpuFacts.here(its, {}, "n1").gpu[0].startswith("n1 ")
    assert "NCCL_COMM_BLOCKING=0 is set, " in GpuFacts.here(its, {"NCCL_COMM_BLOCKING": "0"}, "n1").reason
