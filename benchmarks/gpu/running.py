"""The parts of the check, in processes of their own, perhaps with an MPI from wheels: started, ended in time, read."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu.report import NOT_MEASURED, WRONG, Row, read_rows


def settings_of(text: str) -> Mapping[str, str]:
    """Read settings as a shell does."""
    return dict(word.split("=", 1) for word in text.split())


# NCCL takes little of a GPU that is shared: for right numbers, never for times. From 2.30.3 on a process may have
# several communicators on one. Where ranks are told to be on hosts of their own, all is off that cannot work then,
# and what asks for the node of memory, which small virtual machines have no call for.
SHARED = "NCCL_NVLS_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_DEBUG=WARN"
ONE_PROCESS = f"{SHARED} NCCL_MULTI_RANK_GPU_ENABLE=1"
HOSTIDS = f"""{SHARED} TEST_HOSTIDS=1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
              NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 NCCL_ALGO=Ring NCCL_PROTO=Simple"""
DIGITS = "tests/strategies/test_digits_on_gpus.py"
# Their tests keep the settings of who starts them, which others take away.
KEEPING = ("tests/collectives/test_device_numbers.py", "tests/variables/test_variables_on_gpus.py")
FEW = "hierarchical or named_gpus or broadcast"  # tests of a tiny check


@dataclass(frozen=True)
class Part:
    """One process, or one job of several ranks."""

    name: str  # its files are named after it
    ask: str  # module and function, which takes a bench and a report; or "tests"
    question: str  # for the table, if it never gets to an answer
    limit: float  # seconds that it may take
    ranks: int = 0  # 0 for a process without MPI
    settings: str = ""  # variables, as in a shell
    words: tuple[str, ...] = ()  # of tests: numbers of ranks, and files; by default all but that of digits
    alone: bool = True  # whether it measures times or memory, and so has the machine to itself


def _tests(name: str, ranks: str, words: str, limit: float, settings: str = "", *files: str) -> Part:
    return Part(name, "tests", f"tests that need a GPU, {words}", limit, 0, settings, (ranks, *files), alone=False)


# In the order of their importance: what comes last is left out if time runs short. Those that measure come first, and
# their limits leave a third of the time to the others.
PARTS: tuple[Part, ...] = (
    Part("machine", "gpu.kernels:machine", "what the machine is", 30),
    Part("kernels", "gpu.kernels:measure", "lists of tensors into one buffer and back, and sums", 80),
    Part("public-call", "gpu.calls:public_call", "what the caller of the public call waits", 38),
    Part("peers", "gpu.calls:peers", "all_reduce beside NCCL alone and torch.distributed", 38, 2, HOSTIDS),
    Part("staging", "gpu.calls:staging", "all-reduce of device memory that MPI carries", 38, 2),
    Part("overlap", "gpu.calls:overlap", "reductions that hide behind the backward pass", 38, 2),
    Part("faults", "gpu.calls:faults", "an abort with a kernel in flight", 38, 2, HOSTIDS),
    _tests("right-1", "1", "1 rank, real NCCL", 140),
    _tests("right-staged", "2,3,4", "2 to 4 ranks through the host", 200, "MPIDIST_NCCL=0", *KEEPING),
    _tests("right-hostid", "2,3,4", "2 to 4 ranks, real NCCL by NCCL_HOSTID", 240, HOSTIDS, *KEEPING,
           "tests/transport/nccl/test_nccl.py", "tests/collectives/test_device_edges.py"),
    _tests("right-one-process", "1", "several communicators of one process on a GPU", 60, ONE_PROCESS,
           "tests/transport/nccl/test_gpus_of_process.py"),
    *(_tests(f"digits-{ranks}", ranks, f"digits on the GPU, {ranks} ranks", 60, "", DIGITS) for ranks in "14"),
)  # fmt: skip

ROOT = Path(__file__).parent.parent.parent
# More ranks than cores, or ranks that wait for a GPU which others have: MPICH is to give up the core soon.
SETTINGS = settings_of("""MPIDIST_FLIGHT_DIR=off PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    MPIR_CVAR_POLLS_BEFORE_YIELD=10 MPIR_CVAR_ENABLE_HEAVY_YIELD=1 OMPI_ALLOW_RUN_AS_ROOT=1
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    PRTE_MCA_hwloc_default_binding_policy=none""")
MEETING = (
    "from mpi4py import MPI; c = MPI.COMM_WORLD; n = c.reduce(1); "
    "print('sum', n, *MPI.Get_library_version().split()[:4]) if c.rank == 0 else None"
)
ADVICE = "`make gpu-wheels` where there is a network, and carry the folder `wheels`; see benchmarks/README.md"
TOKEN, OWN = "GPU_CHECK_TOKEN", uuid.uuid4().hex  # in the environment of this check's processes, which it finds them by
LEAST_SECONDS = 8.0
KEPT = 15_000  # of what a part prints, the first and the last characters
GRACE = 8.0  # for a summary of the tests that were done


@dataclass(frozen=True)
class Environment:
    """How to start a part: all variables; what takes `-n 2 program`, empty without MPI; which MPI, or why none."""

    variables: Mapping[str, str]
    launcher: tuple[str, ...]
    mpi: str


@dataclass(frozen=True)
class Outcome:
    """What became of a part: its seconds, why it did not end well, its answers and what it owes, what it printed."""

    name: str
    seconds: float
    why: str
    rows: tuple[Row, ...]
    log: str = ""


def prepare(wheels: Path, folder: Path) -> Environment:
    """Compile, install what is in a folder of wheels, if there is one, into another, and find an MPI that works."""
    site = folder / "site"
    packages = sysconfig.get_path("purelib", "posix_prefix", {"base": str(site)})
    if not (ROOT / "mpidist/transport/native" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
        # Whether that worked, the table says.
        output_of([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], os.environ, 60)
    carried = sorted(map(str, wheels.glob("*.whl")))
    if carried:
        options = ("--quiet", "--no-index", "--no-deps", "--ignore-installed", "--prefix", str(site))
        output_of([sys.executable, "-m", "pip", "install", *options, *carried], os.environ, 120)
    variables = {**os.environ, **SETTINGS, "CUPY_CACHE_DIR": str(folder / "kernel-cache")}

    def put_first(name: str, *paths: object) -> None:
        variables[name] = os.pathsep.join(filter(None, [*map(str, paths), variables.get(name, "")]))

    put_first("PYTHONPATH", ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tools", packages)
    put_first("PATH", site / "bin", Path(sys.executable).parent)
    for library in sorted((site / "lib").glob("libmpi.so.*"))[:1]:
        variables["MPI4PY_LIBMPI"] = str(library)
        put_first("LD_LIBRARY_PATH", library.parent, library.parent / "mpich")
    program = shutil.which("mpiexec", path=variables["PATH"]) or "mpiexec"
    said = output_of([program, "-n", "2", sys.executable, "-c", MEETING], variables, 60).strip()
    _, met, name = said.partition("sum 2")
    if not met:
        return Environment(variables, (), f"two ranks did not meet: {said[-200:]}; {ADVICE}")
    return Environment(variables, (program,), name.strip() + f", of {len(carried)} wheels" * bool(carried))


def output_of(command: list[str], variables: Mapping[str, str], seconds: float) -> str:
    """Return what a program says, or why it does not."""
    try:
        done = subprocess.run(
            command, env={**variables}, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


def run(part: Part, seconds: float, environment: Environment, folder: Path) -> Outcome:
    """Run a part, within the time that is left for all, with its files in a folder."""
    limit, start, is_tests = min(part.limit, seconds), time.monotonic(), part.ask == "tests"
    said, results = "", folder / f"{part.name}.jsonl"
    if not environment.launcher and (part.ranks or is_tests):
        why = f"needs MPI: {environment.mpi}"
    elif limit < LEAST_SECONDS:
        why = "no time was left"
    else:
        why, said = _run(part, limit, environment, results)
    rows = _row_of_tests(part, why, said) if is_tests else read_rows(results)
    if not rows or (why and not is_tests):
        question = "the rest of this part" if rows else part.question
        rows.append(Row(question, NOT_MEASURED, note=why or "it ended without an answer"))
    said = said if len(said) < 2 * KEPT else f"{said[:KEPT]}\n[...]\n{said[-KEPT:]}"
    return Outcome(part.name, time.monotonic() - start, why, tuple(rows), said)


def _run(part: Part, limit: float, environment: Environment, results: Path) -> tuple[str, str]:
    launcher = (*environment.launcher, "-n", str(part.ranks)) if part.ranks else ()
    words = words_of_tests(part, environment) if part.ask == "tests" else ["-m", "gpu", part.ask]
    token, log = f"{OWN}/{uuid.uuid4().hex}", results.with_suffix(".log")
    told = {"GPU_CHECK_OUT": str(results), "GPU_CHECK_RANKS": str(part.ranks), TOKEN: token}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*launcher, sys.executable, *words], cwd=ROOT if part.ask == "tests" else results.parent,
            env={**environment.variables, **settings_of(part.settings), **told}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code, why = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            code, why = 0, f"not done within {limit:.0f} s"
            process.send_signal(signal.SIGINT)  # so that tests end with a summary
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    kill_all(token)
    process.wait()
    said = log.read_text(errors="replace")
    last = said.strip().rpartition("\n")[2] or "it said nothing"
    return f"ended with code {code}: {last[:300]}" if code else why, said


def words_of_tests(part: Part, environment: Environment) -> list[str]:
    """Return what Python is told to run tests that need a GPU; if the check is tiny, a few, and not of all files."""
    ranks, *files = part.words
    options = ["-q", "-m", "gpu", "-rsfE", "-p", "no:cacheprovider", "--ranks", ranks]
    if environment.variables.get("GPU_CHECK_TINY") == "1":
        files = files or [*KEEPING]
        options += ["-k", FEW]
    return ["-m", "pytest", *options, *(files or files_with_gpu_tests())]


def files_with_gpu_tests() -> list[str]:
    """Return the test modules that have tests marked `gpu`, or use the fixture that is, without that of digits."""
    paths = sorted(set((ROOT / "tests").rglob("test_*.py")) - {ROOT / DIGITS})
    return [str(its.relative_to(ROOT)) for its in paths if re.search(r"mark\.gpu|host_cuda\.gpus", its.read_text())]


def _row_of_tests(part: Part, why: str, said: str) -> list[Row]:
    """Read pytest's summary: none, and no row, where no test was run."""
    last = said.strip().rpartition("\n")[2]
    if not said:
        return []
    skipped = re.findall(r"^SKIPPED .*", said, re.MULTILINE)
    notes = "; ".join([why] * bool(why) + re.findall(r"^(?:FAILED|ERROR) .*", said, re.MULTILINE) + skipped)[:700]
    if not (why or re.search(r"[1-9]\d* (passed|failed|error)", last)):
        return [Row(part.question, NOT_MEASURED, note=notes)] if skipped else []
    return [Row(part.question, last.partition(" in ")[0], WRONG if why else "right", notes)]


def kill_all(token: str = OWN) -> None:
    """Kill what was started under a token, and all that it started. Nothing else has it in its environment."""
    for _ in range(3):
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if f"{TOKEN}={token}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.05)
