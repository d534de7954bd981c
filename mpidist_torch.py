"""What `import torch` runs of an installed mpidist (entry point `torch.backends`): it imports no mpidist, no MPI."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Make the backend `mpidist` known to torch. Local, and done once."""
    if dist.is_available() and "mpidist" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mpidist", _make, extended_api=True, devices=["cpu"])
        _take_rank_from_mpi()


def _make(options: Any, backend_options: Any) -> Any:
    from mpidist.torch.process_group import MpiProcessGroup  # takes seconds, which `import torch` must not take

    return MpiProcessGroup(options)


def _take_rank_from_mpi() -> None:
    """Let `init_process_group("mpidist")` import `mpidist.torch` first, as torch needs `RANK` then."""
    of_torch = dist.init_process_group

    @wraps(of_torch)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if "mpidist" in str(backend).lower():
            import_module("mpidist.torch")
            given = signature(of_torch).bind(backend, *args, **kwargs).arguments
            numbers = given.get("rank", -1), given.get("world_size", -1)
            import_module("mpidist.torch.rendezvous").check_numbers(*numbers)
        of_torch(backend, *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
