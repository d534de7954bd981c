"""How kernels are compiled: when they are needed, for old GPUs and drivers, and by CUDA's own compilers."""

import configparser
import contextlib
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_cuda.gpus import only_emulated

from mpidist.transport.gpu.compiled import KERNEL_OPTIONS, KERNELS, kernel_source

__all__ = ["only_emulated"]  # a fixture

pytestmark = pytest.mark.ranks(1)

BEFORE_VOLTA = """
from host_cuda.emulated import Emulated
Emulated().wish("the compute capability", 60)
from mpidist.transport import cuda
from mpidist.transport.gpu.compiled import compile_kernel, longest_table
try:
    compile_kernel("copy_4_long").kernel
except cuda.current().cupy.cuda.compiler.CompileException as error:
    print(longest_table(), type(error).__name__)
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("only_emulated")
def test_gpus_before_volta_take_short_tables():
    """In a process of its own, as CuPy asks a GPU once. NVRTC refuses to compile long ones for it."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", BEFORE_VOLTA]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("168 CompileException\n", 0), done.stderr


CUPY_OPTIONS = ["-ftz=true", "--device-as-default-execution-space"]  # which CuPy 14 puts after ours


def check_ptx(ptx):
    """No product and sum in one, and no subnormal number made a zero; 16 bytes are moved at a time."""
    for word in ("fma.", "mad.f", ".ftz"):
        assert word not in ptx, word
    entries = {entry.split("(")[0].strip(): entry for entry in ptx.split(".visible .entry")[1:]}
    assert set(entries) == {f"mpidist_{kernel}" for kernel in KERNELS}
    assert ".local" not in ptx, "tables are read where they come, and copied by no thread"
    for name in ("copy_4", "cast_f4_bf", "combine_bf_sum", "combine_f4_sum"):
        assert re.search(r"ld(\.global)?(\.cs)?\.v4\.[uf]32", entries[f"mpidist_{name}"]), name
    for name in ("combine_f4_sum", "combine_bf_sum"):  # four reads are under way before the first part is joined
        words = re.findall(r"\b(ld(?:\.global)?(?:\.cs)?\.v4|add\.rn)", entries[f"mpidist_{name}"])
        assert "RRRR" in "".join("+" if word == "add.rn" else "R" for word in words), name


def find_nvrtc():
    """The compiler that CuPy uses, if it is here: with CUDA's toolkit, or from its wheel."""
    places = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        places += map(str, sorted(Path(folder).rglob("libnvrtc.so.*")))
    for place in places:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(place)
    return None


@pytest.mark.no_mpi
@pytest.mark.parametrize("arch", ["compute_75", "sm_90"])
def test_nvrtc_takes_the_kernels_and_the_options(arch):
    """As CuPy gives them to it, without one folder of headers."""
    nvrtc = find_nvrtc()
    if nvrtc is None:
        pytest.skip("needs a GPU's toolkit, or its wheel: NVRTC")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = ctypes.c_char_p(kernel_source().encode())
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    options = [its.encode() for its in (*KERNEL_OPTIONS, *CUPY_OPTIONS, f"-arch={arch}")]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert b"warning" not in log.value
    if arch.startswith("compute"):
        assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
        ptx = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetPTX(program, ptx) == 0
        check_ptx(ptx.value.decode())
    else:
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        assert size.value > 10_000


@pytest.mark.no_mpi
def test_kernel_source_is_in_the_package():
    """What setup.cfg leaves out is missed by those who install alone."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[3] / "setup.cfg")
    assert settings["options.package_data"]["mpidist.transport.gpu"] == "*.cu"
    assert kernel_source().startswith("// Moves and sums")
