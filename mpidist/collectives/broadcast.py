"""Broadcast: the values of one rank, sent to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import ranks_of, send_to
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    host_sizes,
    messages_of,
    require_memory,
    require_values,
)
from mpidist.collectives.arguments.out_arrays import copy_overwritten, target_arrays
from mpidist.collectives.arguments.signature import Arguments, Form, agreed_call, form_of, spec_fields
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import form_text
from mpidist.options import CommunicationOptions
from mpidist.transport import arrays
from mpidist.transport.communicator import Communicator
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import DistributedValues
from mpidist.whole_number import whole_number

__all__ = ["broadcast"]


def _form(
    group: SyncGroup,
    specs: Sequence[Spec],
    call: str,
    destinations: Any,
    root: int,
    is_new: bool,
    structure: nest.Structure,
) -> Form:
    """Return what follows from the form of a broadcast's arguments; refuse it."""
    size, num_local = group.topology.size, group.topology.local_size
    if root >= size:
        raise ValueError(f"root {root} is not one of the ranks 0 to {size - 1}")
    if any(spec.dtype.hasobject or spec.dtype.names is not None for spec in specs):
        raise InvalidArgumentError("cannot broadcast an array of Python objects or records; needed numbers")
    if is_new:
        require_memory(num_local * sum(host_sizes(specs)), num_local)
    elif destinations != "all":
        raise ValueError(f'out takes the value on every rank, so destinations must be "all", got {destinations!r}')
    ranks = ranks_of(destinations, size)
    fields = {"destinations": str(ranks), "root": str(root), "form of the nest": form_text(structure)}
    messages = messages_of(specs) if destinations == "all" else [[index] for index in range(len(specs))]
    return Form(call, fields | spec_fields(structure, specs), specs, specs, plan=messages)


@final
class _Broadcast(Arguments):
    """The arguments of a broadcast: the arrays that are sent, and those in which the results are made."""

    def __init__(self, group: SyncGroup, call: str, tensor: Any, destinations: Any, root: Any, out: Any) -> None:
        if type(destinations) is not str or destinations != "all":
            destinations = ranks_of(destinations, group.topology.size, tensor)
            destinations = "all" if len(destinations) == group.topology.size else destinations
        self.destinations = destinations
        self.root = root if type(root) is int and root >= 0 else whole_number("root", root, 0)
        leaves, structure = nest.flatten(tensor)
        if set(map(type, leaves)) != {np.ndarray}:
            leaves = [leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
            require_values(leaves, tensor)
        self.operands = Operands(leaves, group.devices, call)
        key = call, self.destinations, self.root, out is None, structure
        self.form = form_of(_form, group, self.operands, *key)
        self.values, specs = self.operands.arrays, self.form.specs
        if out is None:
            self.results = [*starmap(group.result_memory.empty, specs)]
            return
        self.outs, self.checked = self.form.known_outs.open(out, structure, leaves, self.values, group.shared)
        self.results = self.outs
        if not self.checked.are_targets:
            self.results = target_arrays(self.outs, specs, [spec.dtype for spec in specs], group.shared)
        if out is not tensor and not self.checked.are_apart_from(self.values):
            self.values = copy_overwritten(self.values, self.results)


def broadcast(
    group: SyncGroup,
    call: str,
    tensor: Any,
    destinations: Any,
    options: CommunicationOptions,
    error: Exception | None = None,
    root: int = 0,
    out: Any = None,
) -> Any:
    """Send one rank's value to the destinations: `CrossDeviceOps.broadcast`. Collective.

    One broadcast per array, or for several small ones in host memory, S bytes to each rank; if not all ranks are
    destinations, one message per array to each destination.
    """
    open_arguments = partial(_Broadcast, group, call, tensor, destinations, root, out)
    with agreed_call(group, call, options, open_arguments, error) as (opened, _):
        for first, *others in opened.form.plan:
            world = group.levels_of(opened.form.specs[first].device).world
            if others:
                each = [(opened.values[index], opened.results[index]) for index in (first, *others)]
                _send_together(world, each, opened.root)
            else:
                _send(world, opened.values[first], opened.results[first], opened.root, opened.destinations)
        if out is not None:
            opened.write_outs(opened.results, group.shared)
            return out
    is_here = opened.destinations == "all" or group.topology.rank in opened.destinations
    return nest.rebuild(tensor, opened.operands.restore(opened.results)) if is_here else None


def _send_together(world: Communicator, each: Sequence[tuple[Any, Any]], root: int) -> None:
    """Send the root's arrays into the results of all ranks, in one message. `each`: an array, and its result."""
    ends = [0, *accumulate(result.nbytes for _, result in each)]
    buffer = world.pack_buffer(ends[-1], np.dtype(np.uint8))
    parts = [buffer[start:stop] for start, stop in pairwise(ends)]
    if world.rank == root:
        for part, (value, result) in zip(parts, each, strict=True):
            part.view(result.dtype).reshape(result.shape)[...] = value
    world.broadcast(buffer, root)
    for part, (_, result) in zip(parts, each, strict=True):
        result[...] = part.view(result.dtype).reshape(result.shape)


def _send(world: Communicator, array: Any, result: Any, root: int, destinations: Any) -> None:
    """Send the root's array into the `result` of the other ranks."""
    is_in_place = result is array
    if result.dtype.kind in "SU" and result.nbytes:  # sent as bytes: one element may be longer than a message
        array, result = arrays.bytes_of(np.ascontiguousarray(array)), arrays.bytes_of(result)
    if destinations == "all" and array.flags.c_contiguous and array.dtype == result.dtype:
        world.broadcast(array.reshape(-1), root, None if is_in_place else result.reshape(-1))
        return
    if world.rank == root and not is_in_place:
        result[...] = array
    send_to(world, result.reshape(-1), root, range(world.size) if destinations == "all" else destinations)
