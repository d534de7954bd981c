"""Programs with torch.distributed over the backend `mpidist`: how they start, and ranks that fail in them."""

import re
import sys
from pathlib import Path

import pytest
from jobs.failing import PROJECT
from jobs.faults import THREE, job, of_others, run_command
from mpi_session.launch import Launcher

__all__ = ["job"]  # a fixture

pytestmark = pytest.mark.no_mpi

HEAD = """
import os, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import mpidist.torch
from mpidist.errors import PeerFailedError
dist.init_process_group("mpidist")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
"""
END = """
dist.destroy_process_group()
print("right")
"""

# The three places where a rank fails in a step of DDP, of several buckets.
STEPS = """
from torch.nn.parallel import DistributedDataParallel as DDP

def fail(place):
    if rank == 1 and place == "PLACE":
        FAULT

class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        fail("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail("backward")
        return gradient

model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), bucket_cap_mb=1e-5, static_graph=STATIC)
for _ in range(3):
    model.module[1](Bad.apply(model(torch.ones(1, 4)))).sum().backward()
    fail("between")
    dist.all_reduce(torch.ones(1))
"""

LEAVES = """
try:
    if rank == 1:
        raise ValueError("bad batch")
    dist.recv(torch.zeros(2), 1)
except ValueError:
    dist.destroy_process_group()  # returns at once
    raise SystemExit(0)
except PeerFailedError as error:
    assert "recv from rank 1, tag 0, on rank 0" in str(error) and "bad batch" in str(error), error
"""


LEAVES_STARTED = """
from mpi4py import MPI

out = torch.zeros(3 * size)
try:
    if rank == 1:
        work = dist.CALL
        raise ValueError("bad batch")
    MPI.COMM_WORLD.recv(source=1)
    dist.CALL.wait()
except ValueError:
    dist.destroy_process_group()
    MPI.COMM_WORLD.send(None, 0)
    raise SystemExit(0)
except PeerFailedError as error:
    assert "bad batch" in str(error), error
"""


GIVEN_UP = """
from datetime import timedelta
from mpi4py import MPI

given_up = dist.new_group(timeout=timedelta(seconds=5))
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=given_up)
    except TimeoutError as error:
        assert "rank 1 of" in str(error), error
MPI.COMM_WORLD.Barrier()
dist.all_reduce(torch.ones(1))
"""

COMPILED = """
import sys
from torch.nn.parallel import DistributedDataParallel as DDP

assert "torch._dynamo" not in sys.modules  # which takes seconds
model = torch.nn.Linear(2, 1, bias=False)
compiled = torch.compile(DDP(model), backend="eager")
for _ in range(3):
    model.weight.grad = None
    compiled(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.tolist() == [[1.5, 1.5]], model.weight.grad

@torch.compile(backend="eager")
def doubled_sum(x):
    x = 2 * x
    dist.all_reduce(x)
    return x + 1

assert doubled_sum(torch.ones(2)).tolist() == [5, 5]
"""

ADDRESSES = """
import socket
from mpi4py import MPI

assert (int(os.environ["LOCAL_RANK"]), size) == (rank, 2)

def initialise(backend, **options):
    dist.destroy_process_group()
    dist.init_process_group(backend, **options)
    dist.barrier()

initialise("gloo")
initialise("mpidist")
with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
    ports = MPI.COMM_WORLD.bcast([str(each.getsockname()[1]) for each in (one, other)])
MPI.COMM_WORLD.Barrier()
initialise("mpidist", init_method="tcp://127.0.0.1:" + ports[0], rank=rank, world_size=size)
os.environ["MASTER_PORT"] = ports[1]
initialise("gloo")
"""

ALONE = """
import sys, torch
import torch.distributed as dist
print(dist.Backend.MPIDIST, *sys.modules)
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)
dist.init_process_group("mpidist")
print(dist.get_world_size())
"""


def run_file(folder, ranks, file, *arguments, **variables):
    launcher = [*Launcher.find(None).command, "-n", str(ranks)]
    return run_command(folder, [*launcher, sys.executable, str(file), *arguments], ranks, **variables)


def run(folder, ranks, program, **variables):
    file = folder / "program.py"
    file.write_text(program)
    return run_file(folder, ranks, file, **variables)


@pytest.mark.long
def test_compiled_model_of_ddp_trains_and_shows_no_frame_of_mpidist(tmp_path):
    ended = run(tmp_path, 2, HEAD + COMPILED + END)
    assert (ended.status, ended.out.count("right")) == (0, 2), ended.err
    assert "mpidist/" not in ended.err


def test_program_needs_nothing_but_the_launcher_and_import_leaves_every_way_to_an_address_open(tmp_path):
    ended = run(tmp_path, 2, HEAD + ADDRESSES + END)
    assert (ended.status, ended.out.count("right")) == (0, 2), ended.err


def test_group_that_one_rank_has_given_up_is_destroyed_with_a_warning(tmp_path):
    ended = run(tmp_path, 2, HEAD + GIVEN_UP + END)
    assert (ended.status, ended.out.count("right")) == (0, 2), ended.err
    assert "a group was destroyed that other ranks had given up" in ended.err


def test_example_goes_on_from_a_checkpoint_with_other_ranks(tmp_path):
    losses = {}
    for folder, ranks, steps in [("continued", 2, "4"), ("continued", 3, "8"), ("undisturbed", 1, "8")]:
        ended = run_file(tmp_path, ranks, Path(PROJECT) / "docs/examples/gpt.py", str(tmp_path / folder), steps)
        assert ended.status == 0, ended.err
        before, _, loss = ended.out.partition("\n")[0].partition(": loss ")
        assert before == f"step {steps}"
        losses[folder] = float(loss)
    assert losses["continued"] == pytest.approx(losses["undisturbed"], abs=0.01)
    assert losses["continued"] < 4  # at first, the logarithm of the number of letters: 4.6


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process without a launcher prints, of three things."""
    ended = run_command(tmp_path_factory.mktemp("alone"), [sys.executable, "-c", ALONE], 1)
    assert ended.status == 0, ended.err
    return ended.out.splitlines()


def test_entry_point_registers_the_backend_and_imports_no_mpidist(alone):
    name, *modules = alone[0].split()
    assert name == "mpidist"
    assert not [one for one in modules if one.partition(".")[0] in ("mpidist", "mpi4py")]


@pytest.mark.parametrize("backend", ["'mpidist'", "backend='cpu:mpidist,cuda:nccl'", "'MPIDIST', 'env://'"])
def test_installed_backend_needs_no_import_of_mpidist(tmp_path, backend):
    head = re.sub(r".*mpidist\b.*import.*\n|import mpidist.*\n", "", HEAD).replace('"mpidist"', backend)
    ended = run(tmp_path, 2, head + "assert (int(os.environ['LOCAL_RANK']), size) == (rank, 2)" + END)
    assert (ended.status, ended.out.count("right")) == (0, 2), ended.err


def test_installed_backend_changes_no_other_backend(alone):
    assert "environment variable RANK expected, but not set" in alone[1]


def test_installed_backend_is_a_group_of_one_without_a_launcher(alone):
    assert alone[2:] == ["1"]


def test_environment_of_a_launcher_that_mpi_does_not_see_is_refused(tmp_path):
    ended = run(tmp_path, 2, HEAD + END, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert 0 < ended.status < 128
    assert "leave RANK and WORLD_SIZE unset, or give the numbers of MPI" in ended.err


@pytest.mark.parametrize(("size", "given"), [("3", ""), ("1", ", rank=0, world_size=3")], ids=["torchrun", "spawn"])
def test_environment_of_more_processes_than_ranks_is_refused_before_torch_waits(tmp_path, size, given):
    variables = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = run(tmp_path, 1, HEAD.replace('"mpidist"', f'"mpidist"{given}') + END, **variables)
    assert 0 < ended.status < 128
    assert "`mpidist run -n 3` starts 3 ranks" in ended.err


def test_receive_from_a_rank_that_has_left_raises_its_error(tmp_path):
    ended = run(tmp_path, 2, HEAD + LEAVES + END)
    assert (ended.status, ended.out.count("right")) == (0, 1), ended.err


@pytest.mark.parametrize("call", ["all_gather_into_tensor(out, torch.ones(3), ", "broadcast(out, 0, "])
def test_rank_that_leaves_in_a_started_call_ends_that_of_others(tmp_path, call):
    ended = run(tmp_path, 2, HEAD + LEAVES_STARTED.replace("CALL", f"{call}async_op=True)") + END)
    assert (ended.status, ended.out.count("right")) == (0, 1), ended.err


@pytest.mark.parametrize(
    ("place", "fault", "static", "named"),
    [
        ("forward", "raise ValueError('bad batch')", False, "ValueError: bad batch"),
        ("backward", "raise ValueError('bad batch')", False, "ValueError: bad batch"),
        ("backward", "raise ValueError('bad batch')", True, "ValueError: bad batch"),
        ("between", "raise SystemExit(0)", False, "rank 1 ended the program while ranks 0, 2 called all_reduce"),
        ("between", "dist.barrier()", False, "barrier"),
    ],
    ids=["forward", "backward", "static", "leaves", "other_call"],
)
def test_rank_that_fails_in_training_is_named(tmp_path, place, fault, static, named):
    steps = STEPS.replace("PLACE", place).replace("FAULT", fault).replace("STATIC", str(static))
    ended = run(tmp_path, 3 if place == "between" else 2, HEAD + steps + END)
    assert 0 < ended.status < 128, ended  # ended by no signal
    assert "rank 1" in ended.err, ended.err
    assert named in ended.err, ended.err
    assert "right" not in ended.out


def test_killed_rank_is_named_on_every_other(job):
    body = """
import torch
import torch.distributed as dist
import mpidist.torch
dist.init_process_group("mpidist")

def steps():
    while True:
        if is_faulty and dist.group.WORLD._get_sequence_number_for_group() > 9:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3))

attempt("steps", steps)
dist.destroy_process_group()  # returns at once
note("end")
"""
    ended = job(body, THREE, is_blind=True)
    assert ended.status != 0
    for note in of_others(ended, "steps", THREE):
        assert note.kind == "PeerFailedError", note
        assert "rank 1" in note.text, note
    of_others(ended, "end", THREE)
