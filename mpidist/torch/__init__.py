"""`torch.distributed` over MPI: `import mpidist.torch`, then `init_process_group("mpidist")`.

The import needs no address, port, rank or size: where `RANK` is not set, it takes them from MPI and sets the variables
that torchrun sets. Importing is collective over all ranks of the job. Tensors are those in host memory.
"""

from mpidist.torch.gradients import all_reduce_gradients, broadcast
from mpidist.torch.rendezvous import set_environment
from mpidist_torch import register

__all__ = ["all_reduce_gradients", "broadcast"]

set_environment()
register()
