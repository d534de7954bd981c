"""Build the emulated CUDA into a virtual environment that has CuPy: its processes then find GPUs that are not there.

    .venv-cuda/bin/python tests/host_cuda/build.py

Each process of this environment imports `preload.py` when it starts, by a `.pth` file, which does something only if
TEST_GPUS says how many GPUs there shall be. Needs g++ and binutils, on x86-64.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
TARGET = Path(sys.prefix) / "host_cuda"
LIBRARIES = {  # in the order in which they are loaded, as the others need the first
    "libcuda.so.1": ["runtime.cpp", "driver.cpp", "accesses.cpp", "control.cpp"],
    "libnvrtc.so.12": ["nvrtc.cpp", "-L.", "-l:libcuda.so.1"],
    "libnccl.so.2": ["nccl.cpp", "-L.", "-l:libcuda.so.1"],
}
COMPILER = ["g++", "-O1", "-g1", "-std=c++17", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]


def build():
    """Compile the libraries, note where CuPy's runtime has its functions, and have processes preload them."""
    shutil.rmtree(TARGET, ignore_errors=True)
    (TARGET / "kernels").mkdir(parents=True)  # what nvrtc.cpp compiles
    shutil.copytree(SOURCES / "include", TARGET / "include")
    for file in ("kernel.h", "preload.py"):
        shutil.copy(SOURCES / file, TARGET)
    headers = [f"-I{SOURCES / 'include'}", f"-isystem{SITE / 'nvidia' / 'cuda_runtime' / 'include'}"]
    for name, parts in LIBRARIES.items():
        files = [str(SOURCES / part) if part.endswith(".cpp") else part for part in parts]
        subprocess.run([*COMPILER, *headers, *files, f"-Wl,-soname,{name}", "-o", name, "-ldl"], cwd=TARGET, check=True)
    (runtime,) = SITE.glob("cupy_backends/cuda/api/runtime.*.so")
    runtime = runtime.resolve()  # as the system says where it is loaded
    own = {name.removeprefix("host_"): at for name, at in symbols("-D", TARGET / "libcuda.so.1").items()}
    jumps = {name: at for name, at in symbols("", runtime).items() if name.startswith("cuda") and name in own}
    (TARGET / "jumps.json").write_text(json.dumps({"runtime": str(runtime), "functions": jumps}))
    line = f"import os, runpy; 'TEST_GPUS' in os.environ and runpy.run_path({str(TARGET / 'preload.py')!r})\n"
    (SITE / "host_cuda.pth").write_text(line)


def symbols(option, library):
    """Return the functions of a library, with their offsets."""
    command = ["nm", *option.split(), "--defined-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: int(at, 16) for at, kind, name in (line.split() for line in lines) if kind in "tT"}


if __name__ == "__main__":
    build()
