"""Objects of Python, sent between ranks: nests of arrays, numbers and texts; others pickled, if a program allows it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist import nest
from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.broadcast import broadcast
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport.group.raise_together import LocalWork
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import text_of

__all__ = ["broadcast_object", "gather_object"]

_ADVICE: Final = "pass pickle=True on all ranks, if each may run code that another one sends"

Bytes = np.ndarray[Any, Any]


def broadcast_object(
    group: SyncGroup, item: Any, root: Any, pickled: bool, options: CommunicationOptions, call: str = ""
) -> Any:
    """See `Strategy.broadcast_object`. Collective: two broadcasts, of the length and of the bytes."""
    call = call or _named("broadcast_object", pickled)
    data, error = np.empty(0, np.uint8), None
    if root == group.topology.rank:
        data, error = _written(call, item, pickled)
    length = int(broadcast(group, call, np.int64(data.size), "all", options, error, root))
    if root != group.topology.rank:
        data = np.empty(length, np.uint8)
    data = broadcast(group, call, data, "all", options, root=root)
    return _read(group, call, lambda: _item_of(data, pickled), pickled, options)


def gather_object(group: SyncGroup, item: Any, pickled: bool, options: CommunicationOptions) -> list[Any]:
    """See `Strategy.gather_object`. Collective: one all-gather."""
    call = _named("gather_object", pickled)
    data, error = _written(call, item, pickled)
    one_each = Replicas.one_per_rank(group.topology)
    lengths, everything = all_gather(group, call, (np.array([data.size]), data), 0, options, one_each, error)
    parts = np.split(everything, np.cumsum(lengths)[:-1])
    items: list[Any] = _read(group, call, lambda: [_item_of(part, pickled) for part in parts], pickled, options)
    return items


def _named(call: str, pickled: bool) -> str:
    """Return the name of a call, which ranks compare: so no rank unpickles without its program's consent."""
    return f"{call} with pickle" if pickled else call


def _written(call: str, item: Any, pickled: bool) -> tuple[Bytes, Exception | None]:
    """Write an object as bytes. Never raises, but returns the error, of one kind also where other ranks have none."""
    try:
        if pickled:
            return np.frombuffer(pickle.dumps(item, pickle.HIGHEST_PROTOCOL), np.uint8), None
        return nest.encode(item, "the object", advice=_ADVICE), None
    except Exception as problem:  # whatever a user's class raises: the other ranks must learn of it
        error = InvalidArgumentError(f"{call}: {text_of(problem) if pickled else problem}")
        error.__cause__ = problem
        return np.empty(0, np.uint8), error


def _item_of(data: Bytes, pickled: bool) -> Any:
    return pickle.loads(data.tobytes()) if pickled else nest.decode(data)


def _read(group: SyncGroup, call: str, read: Callable[[], Any], pickled: bool, options: CommunicationOptions) -> Any:
    """Read objects. Unpickling may fail on some ranks alone, as where a module is missing, so all ranks then meet."""
    if not pickled:
        return read()
    with LocalWork(group, call, options.timeout_seconds):
        return read()
    raise AssertionError  # `LocalWork` keeps no exception back
