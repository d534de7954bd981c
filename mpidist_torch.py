"""What `import torch` runs of an installed mpidist (entry point `torch.backends`): it imports no mpidist, no MPI."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Make the backend `mpidist` known to torch. Local, and done once."""
    if dist.is_available() and "mpidist" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mpidist", _make, extended_api=True, devices=["cpu"])


def _make(options: Any, backend_options: Any) -> Any:
    from mpidist.torch.process_group import make_process_group  # takes seconds, which `import torch` must not take

    return make_process_group(options)
