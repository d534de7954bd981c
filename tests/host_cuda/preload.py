"""Give this process the emulated CUDA, before it imports CuPy. See build.py, which lets processes run this."""

import ctypes
import json
import mmap
import os
from pathlib import Path

LIBRARIES = ("libcuda.so.1", "libnvrtc.so.12", "libnccl.so.2")  # the others need the first
HERE = Path(__file__).parent
PAGE = mmap.PAGESIZE
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC


def preload():
    """Load the libraries, which CuPy then finds by their names, and lead its own CUDA runtime to them."""
    os.environ["HOST_CUDA"] = str(HERE)
    os.environ["CUDA_PATH"] = str(HERE)  # where CuPy looks for headers
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # on disk the emulated NVRTC keeps its own
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB is compiled code
    libraries = [ctypes.CDLL(str(HERE / name), ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    noted = json.loads((HERE / "jumps.json").read_text())
    ctypes.CDLL(noted["runtime"])  # Python's import finds it loaded
    start = next(line for line in Path("/proc/self/maps").read_text().splitlines() if noted["runtime"] in line)
    base = int(start.partition("-")[0], 16)
    for name, offset in noted["functions"].items():
        address = ctypes.cast(getattr(libraries[0], f"host_{name}"), ctypes.c_void_p).value
        assert address is not None
        overwrite(base + offset, b"\x48\xb8" + address.to_bytes(8, "little") + b"\xff\xe0")  # mov rax, address; jmp rax


def overwrite(at, code):
    """Put machine code at an address."""
    first = at // PAGE * PAGE
    nbytes = (at + len(code) - first + PAGE - 1) // PAGE * PAGE
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), WRITABLE):
        raise OSError(ctypes.get_errno(), "the code of CuPy's CUDA runtime cannot be overwritten")
    ctypes.memmove(at, code, len(code))


preload()
