"""Mixed process groups: `init_process_group("cpu:mpidist,cuda:nccl")`, where torch has no NCCL."""

import pytest
import torch
import torch.distributed as dist
from support.everywhere import raises_everywhere
from support.process_groups import open_process_group
from torch._subclasses.fake_tensor import FakeTensorMode

from mpidist.errors import InvalidArgumentError, UnavailableError

# Names that torch replaces by newer ones.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.ranks(1, 3),
    pytest.mark.skipif(dist.is_nccl_available(), reason="torch has NCCL"),
]


def cuda_tensor():
    """Make a tensor that torch takes for one on a CUDA device, with no memory behind it."""
    with FakeTensorMode():
        return torch.empty(2, device="cuda")


def test_mixed_group_reduces_tensors_in_host_memory(comm, tmp_path):
    with open_process_group(comm, tmp_path, backend="cpu:mpidist,cuda:nccl"):
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [comm.size] * 2
        objects = [None] * comm.size
        dist.all_gather_object(objects, comm.rank)
        assert objects == [*range(comm.size)]


@pytest.mark.parametrize(
    ("backend", "kind", "text"),
    [
        ("cpu:mpidist,cuda:nccl", UnavailableError, "built without NCCL: install a PyTorch for CUDA"),
        ("mpidist", ValueError, r'call init_process_group\("cpu:mpidist,cuda:nccl"\)'),
    ],
)
def test_mixed_group_without_nccl_refuses_cuda_tensors_on_every_rank(comm, tmp_path, backend, kind, text):
    with open_process_group(comm, tmp_path, backend=backend):
        for call in (
            lambda value: dist.all_reduce(value),
            lambda value: dist.all_gather([value] * comm.size, value),
            lambda value: dist.reduce_scatter(value, [value] * comm.size),
            lambda value: dist.all_reduce_coalesced([value]),
        ):
            with raises_everywhere(comm, kind, text):
                call(cuda_tensor())
        dist.barrier()


@pytest.mark.ranks(3)
def test_mixed_group_cuda_tensor_of_one_rank_raises_on_every_rank(comm, tmp_path):
    with open_process_group(comm, tmp_path, backend="cpu:mpidist,cuda:nccl"):
        with raises_everywhere(comm, InvalidArgumentError, "rank 1.*built without NCCL"):
            dist.all_reduce(cuda_tensor() if comm.rank == 1 else torch.ones(2))
        if comm.rank == 1:
            with pytest.raises(UnavailableError, match="built without NCCL"):
                dist.send(cuda_tensor(), 0)
        dist.barrier()
