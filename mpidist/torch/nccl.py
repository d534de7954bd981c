"""CUDA tensors of a process group: torch's own NCCL group, which takes the calls that pass them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from mpidist.errors import UnavailableError

__all__ = ["has_cuda_tensors", "make_nccl_group", "takes_cuda"]


def has_cuda_tensors(arguments: Any) -> bool:
    """Whether the first tensor of an argument of a call, or of nested lists of tensors, is on a CUDA device."""
    if isinstance(arguments, torch.Tensor):
        return bool(arguments.device.type == "cuda")
    return isinstance(arguments, (list, tuple)) and any(has_cuda_tensors(one) for one in arguments[:1])


def takes_cuda(group: ProcessGroup) -> bool:
    """Whether the user initialised a process group with NCCL for CUDA tensors."""
    config: str = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return "cuda:nccl" in config


def make_nccl_group(group: ProcessGroup, store: Any, timeout: timedelta) -> ProcessGroup:
    """Make the NCCL group of the same ranks, of their store. Local: NCCL connects the ranks in their first call."""
    if not takes_cuda(group):
        raise ValueError(
            'a tensor is on a CUDA device, and init_process_group("mpidist") takes tensors in host memory: pass '
            'tensor.cpu(), or call init_process_group("cpu:mpidist,cuda:nccl"), which passes CUDA tensors to NCCL'
        )
    if not dist.is_nccl_available():
        raise UnavailableError(
            f"a tensor is on a CUDA device, and PyTorch {torch.__version__} is built without NCCL: install a PyTorch "
            "for CUDA, or pass tensor.cpu()"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    store = dist.PrefixStore("cuda/", store)
    nccl = ProcessGroup(store, group.rank(), group.size())
    backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    nccl._set_default_backend(ProcessGroup.BackendType.NCCL)
    nccl._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    nccl._set_group_name(f"{group.group_name} of CUDA tensors")
    return nccl
