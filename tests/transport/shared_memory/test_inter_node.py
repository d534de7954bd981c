"""Shards across nodes: the same sums in messages of any length."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.ranks import Intracomm

from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.inter_node import ShardAllReduce, ShardExchange

COUNTS = (1, 15, 16, 1000, 4099)


@pytest.mark.ranks(2, 3)
def test_shards_are_added_in_messages_of_any_length(comm: Intracomm) -> None:
    for way, message_bytes in product(("float32", "float16", "chain"), (64, 1000, MAX_CHUNK_BYTES)):
        across = MpiCommunicator(comm.Dup(), "across_nodes", message_bytes=message_bytes)
        exchange = ShardExchange(across)
        inputs = [np.random.default_rng(count).integers(-99, 99, (comm.size, count)) for count in COUNTS]
        buffers = [numbers[comm.rank].astype(np.float32) for numbers in inputs]
        shards = [_started(exchange, buffer, way) for buffer in buffers]
        while not all(shard.is_done for shard in shards):
            exchange.progress()
        for buffer, numbers in zip(buffers, inputs, strict=True):
            np.testing.assert_array_equal(buffer, numbers.sum(0), strict=False)
        across.free()


def _started(exchange: ShardExchange, buffer: Any, way: str) -> ShardAllReduce:
    if way != "chain":
        return exchange.start(buffer, Reduction(), np.dtype(np.float16) if way == "float16" else None)
    own = buffer.copy()

    def fold(before: Any) -> None:
        buffer[...] = own if before is None else before + own

    return exchange.start_chain(buffer, fold)
