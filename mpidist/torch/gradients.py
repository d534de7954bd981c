"""For a training loop of one's own: gradients after the backward pass, and equal weights before the first step."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from mpidist.checksums import checksum
from mpidist.torch.process_group import MpiProcessGroup, bytes_of_tensor, sparse_tensor

__all__ = ["all_reduce_gradients", "broadcast"]

_HAS_GRADIENT: Final = ".grad is not None"  # no name of a parameter begins with a dot
_ADVICE: Final = "the parameters must be equal before the first step: call mpidist.torch.broadcast(model)"


def all_reduce_gradients(module: Any, op: str = "mean", group: Any = None) -> None:
    """Combine the gradients of a module's parameters, in place, in one call after the backward pass. Collective.

    Ranks match parameters by name, and may have made them in different orders. A parameter without a gradient on some
    ranks counts as zeros there; without one on all ranks it stays without.
    Sparse gradients, of embeddings with `sparse=True`, are reduced in a call of their own, and stay sparse.
    The first call of a module requires that its parameters are equal on all ranks, bit by bit.

    Args:
        module: A `torch.nn.Module` in host memory. The names of the parameters that require gradients are the same on
            all ranks.
        op: `"mean"` or `"sum"`.
        group: A process group of mpidist; by default that of all ranks.

    Raises:
        InvalidArgumentError: If the ranks' parameters, or their first values, or operations differ. On every rank.
        ValueError: If `op` is another operation on every rank.
        TypeError: If the group is none of mpidist, or if parameters are DTensors on every rank.
    """
    ranks = _group_of(group)
    ranks.told("all_reduce_gradients", partial(_all_reduce_gradients, module, op, ranks), ())


def _all_reduce_gradients(module: Any, op: str, ranks: MpiProcessGroup) -> None:
    if op not in ("mean", "sum"):
        raise ValueError(f'op must be "mean" or "sum", got {op!r}')
    # In the order of names, as calls take them: a module may have been filled in another order on each rank.
    parameters = dict(sorted((name, one) for name, one in module.named_parameters() if one.requires_grad))
    if any(hasattr(one, "full_tensor") for one in parameters.values()):
        raise TypeError("the parameters are DTensors: FSDP reduces their gradients in backward(), so omit this call")
    if module not in ranks.compared:  # equal gradients keep equal parameters equal
        _require_equal(parameters, ranks)
        ranks.compared.add(module)
    has_gradient = torch.tensor([float(one.grad is not None) for one in parameters.values()])
    sparse = _sparse_weights(module)
    gradients = {name: _gradient_of(one, id(one) in sparse) for name, one in parameters.items()}
    dense = {name: one for name, one in gradients.items() if not one.is_sparse}
    rows = {name: one for name, one in gradients.items() if one.is_sparse}
    dense[", ".join((_HAS_GRADIENT, *rows))] = has_gradient  # so that the names of both kinds are compared at once
    ranks.ops.all_reduce(op, dense, ranks.options_of(), out=dense, call="all_reduce_gradients")
    if rows:
        ranks.reduce_sparse(op, rows, None, "all_reduce_gradients")
    for (name, parameter), is_there in zip(parameters.items(), has_gradient.tolist(), strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = gradients[name]


def _require_equal(parameters: dict[str, Any], ranks: MpiProcessGroup) -> None:
    """Compare names and shapes of parameters on all ranks, and then the numbers. Collective."""
    shapes = tuple((name, tuple(one.shape)) for name, one in parameters.items())
    ranks.compare("all_reduce_gradients", parameters=shapes)
    values = {f"checksum of {name}": bytes_of_tensor(one.cpu()) for name, one in parameters.items()}
    sums = {name: f"{checksum(one):08x}" for name, one in values.items()}
    ranks.compare("all_reduce_gradients", advice=_ADVICE, **sums)


def _sparse_weights(module: Any) -> set[int]:
    """Return the ids of parameters whose gradients are sparse: those of embeddings alone that are made so."""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    embeddings = [one for one in module.modules() if isinstance(one, kinds) and one.sparse]
    others = {id(part) for one in module.modules() if one not in embeddings for part in one.parameters(False)}
    return {id(one.weight) for one in embeddings} - others


def _gradient_of(parameter: Any, is_of_sparse_module: bool) -> Any:
    if parameter.grad is not None:
        return parameter.grad if parameter.grad.is_sparse else parameter.grad.detach()
    if not is_of_sparse_module:
        return torch.zeros_like(parameter)
    rows = parameter.detach().new_empty(0, *parameter.shape[1:])
    return sparse_tensor(torch.empty(1, 0, dtype=torch.int64), rows, parameter.shape)


def broadcast(module: Any, optimizer: Any = None, root: int = 0, group: Any = None) -> None:
    """Give all ranks one rank's parameters and buffers, and its optimizer's state. Collective.

    Args:
        module: A `torch.nn.Module` in host memory. Parameters and buffers have the same names on all ranks.
        optimizer: A `torch.optim.Optimizer` of the module's parameters; its state is sent with pickle.
        root: The rank in the group that sends.
        group: A process group of mpidist; by default that of all ranks.

    Raises:
        InvalidArgumentError: If the ranks' parameters or kinds of optimizers differ, or an optimizer cannot take the
            state. On every rank.
        TypeError: If the group is none of mpidist.
    """
    ranks = _group_of(group)
    values = {name: one.detach() for name, one in (*module.named_parameters(), *module.named_buffers())}
    call = "mpidist.torch.broadcast" + ("" if optimizer is None else f" with optimizer {type(optimizer).__name__}")
    if values:
        ranks.ops.broadcast(values, "all", root=root, out=values, call=call)
    if optimizer is not None:
        states = [optimizer.state_dict() if ranks.rank() == root else None]
        dist.broadcast_object_list(states, group=ranks, group_src=root)

        def load() -> None:
            if ranks.rank() != root:
                optimizer.load_state_dict(states[0])
            ranks.ops.all_reduce("max", 0, ranks.options_of(), call=call)  # compares: an error is that of all ranks

        ranks.told(call, load, ())


def _group_of(group: Any) -> MpiProcessGroup:
    ranks = dist.group.WORLD if group is None else group
    if not isinstance(ranks, MpiProcessGroup):
        raise TypeError(
            f'the process group is {ranks}, and one of mpidist is needed: call init_process_group("mpidist") before'
        )
    return ranks
