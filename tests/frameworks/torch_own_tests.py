"""Torch's own tests of a backend: `mpiexec -n 3 python torch_own_tests.py BACKEND FOLDER [PATTERN]`.

The ranks of one launch run the tests, each in a new process group. Rank 0 writes FOLDER/results.json: for every test
"passed", "skipped" or "failed", and the texts of the ranks.
"""

import json
import os
import re
import signal
import sys
import unittest
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from mpi4py import MPI

BACKEND, FOLDER, PATTERN = sys.argv[1], Path(sys.argv[2]), (sys.argv[3:4] or [""])[0]
WORLD = MPI.COMM_WORLD.Dup()
warnings.simplefilter("ignore")
# The tests take these when they are imported. They have lists of names of backends, and gloo's is in all of them.
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD.size), RANK=str(WORLD.rank), TEMP_DIR=str(FOLDER))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", MPIDIST_ON_ERROR="raise", MPIDIST_FLIGHT_DIR="off")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

torch.set_num_threads(1)
if BACKEND == "mpidist":
    import mpidist.torch  # noqa: F401

from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.PROFILING_SUPPORTED_BACKENDS = []  # the numbers, and not which events a profiler sees


class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests that no other class of torch chooses from."""

    __test__ = False


class Late(Exception):
    """A test has taken too long."""


def go_by_the_name_of_gloo():
    """Make process groups of the backend wherever a test wants one of gloo."""
    make = c10d._new_process_group_helper

    def renamed(size, rank, ranks, name, *rest, **options):
        group, store = make(size, rank, ranks, c10d.Backend(BACKEND) if name == "gloo" else name, *rest, **options)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = "gloo", c10d._world.pg_map[group][1]
        return group, store

    c10d._new_process_group_helper = renamed


@contextmanager
def limited(seconds):
    def end(*_):
        raise Late(f"the test took longer than {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run(number, name):
    """Run one test on this rank, and return its verdict and a text."""
    try:
        with limited(600):
            case = Case(name)
            case.rank, case.file_name = WORLD.rank, str(FOLDER / f"init{number}")
            timeout = distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{case.file_name}",
                rank=WORLD.rank,
                world_size=WORLD.size,
                timeout=timedelta(seconds=timeout),
            )
            WORLD.Barrier()
            distributed_test.Barrier.barrier_id = 0
            if WORLD.rank == 0:
                distributed_test.Barrier.init()  # removes files, which only one rank can
            WORLD.Barrier()
            set_rng_seed(1234)
            getattr(case, name)()
            if dist.is_initialized():
                dist.destroy_process_group()
        return "passed", ""
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        skips = {one.exit_code: one.message for one in common_distributed.TEST_SKIPS.values()}
        return ("skipped", skips[end.code]) if end.code in skips else ("passed" if not end.code else "failed", str(end))
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"[:600]
    finally:
        with limited(600):
            if dist.is_initialized():
                try:
                    dist.destroy_process_group()
                except Exception as error:
                    print(f"[{WORLD.rank}] {name}: destroy_process_group: {error}", file=sys.stderr)


def main():
    for folder in ("barrier", "test_dir", "init_dir"):
        (FOLDER / folder).mkdir(exist_ok=True)
    if BACKEND != "gloo":
        go_by_the_name_of_gloo()
    names = [name for name in sorted(dir(Case)) if name.startswith("test_") and re.search(PATTERN, name)]
    results = {}
    for number, name in enumerate(name for name in names if not re.search("cuda|nccl|gpu|rocm", name)):
        verdicts, texts = zip(*WORLD.allgather(run(number, name)), strict=True)
        verdict = next((one for one in ("failed", "passed") if one in verdicts), "skipped")
        results[name] = verdict, texts
        if WORLD.rank == 0:
            print(f"{verdict:8} {name}", *(text.replace("\n", " ")[:200] for text in dict.fromkeys(texts)), flush=True)
            (FOLDER / "results.json").write_text(json.dumps(results, indent=1))


main()
os._exit(0)  # without what is left of broken groups
