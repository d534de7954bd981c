"""A process group of torch.distributed over the ranks of the session."""

import os
from contextlib import contextmanager

__all__ = ["open_process_group"]


@contextmanager
def open_process_group(comm, folder, backend="mpidist", **options):
    """Initialise torch.distributed over all ranks, and give it. Collective. `options`: of `init_process_group`."""
    import torch.distributed as dist  # environments without torch collect tests, too

    os.environ["RANK"] = str(comm.rank)  # else the import sets all variables, for the other tests of the session, too
    try:
        import mpidist.torch  # noqa: F401
    finally:
        del os.environ["RANK"]
    store = dist.FileStore(comm.bcast(str(folder / "store")), comm.size)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, **options)
    try:
        yield dist
    finally:
        dist.destroy_process_group()
