"""What a server makes of messages, also of those that no worker of this package sends."""

import numpy as np
import pytest

from mpidist.parameter_server.membership import Membership
from mpidist.parameter_server.messages.protocol import (
    ANSWER,
    CHUNK_BYTES,
    DATA,
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    REQUEST,
    Change,
    Op,
    Outcome,
    plan_messages,
    to_json,
)
from mpidist.parameter_server.server import ParameterServer
from mpidist.transport.group.service_group import ServiceGroup, meet_ranks

NOTHING = np.empty(0)


LISTS = [(), (0,), (5,), (CHUNK_BYTES,), (CHUNK_BYTES + 1,), (3, 0, 2 * CHUNK_BYTES, 7)]
LISTS += [(CHUNK_BYTES // 2,) * 5, (8,) * 999]


@pytest.mark.no_mpi
def test_messages_of_any_sizes_hold_every_byte_once_and_in_order():
    for sizes in LISTS:
        messages, at = plan_messages(sizes), [0] * len(sizes)
        assert all(0 < sum(stop - start for _, start, stop in pieces) <= CHUNK_BYTES for pieces in messages)
        for pieces in messages:
            assert len(pieces) == 1 or all((start, stop) == (0, sizes[item]) for item, start, stop in pieces)
            for item, start, stop in pieces:
                assert start == at[item]
                at[item] = stop
        assert tuple(at) == sizes


def with_a_server(comm, work):
    """Give rank 0 a function that sends a request and waits for the answer; the last rank serves."""
    comm, _ = meet_ranks(comm, None)
    group = ServiceGroup.from_mpi(comm, [0, comm.size - 1])
    if group is None:
        return
    if comm.rank > 0:
        ParameterServer(group, Membership(group, (0,), None), "the server").serve()
        group.free()
        return
    last = [0]

    def send(op, key=0, data=NOTHING, rows=0, change=0):
        last[0] += 1
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        message = np.zeros(MESSAGE_BYTES, np.uint8)
        HEADER.pack_into(message.data, 0, op, last[0], key, rows, change, raw.size, *[0.0] * 6)
        end = HEADER_BYTES
        if raw.size <= INLINE_BYTES:
            end += raw.size
            message[HEADER_BYTES:end] = raw
        group.comm.Send(message[:end], 1, REQUEST)
        for start in range(0, raw.size if raw.size > INLINE_BYTES else 0, CHUNK_BYTES):
            group.comm.Send(raw[start : start + CHUNK_BYTES], 1, DATA)
        group.comm.Recv(message, 1, ANSWER)
        outcome, nbytes = HEADER.unpack_from(message.data)[0], HEADER.unpack_from(message.data)[5]
        return outcome, message[HEADER_BYTES : HEADER_BYTES + nbytes].tobytes()

    work(send)
    send(Op.DONE, rows=1)
    group.free()


def allocate(ask, key, value):
    about = to_json([list(value.shape), value.dtype.name])
    data = np.concatenate([about, value.reshape(-1).view(np.uint8)])
    assert ask(Op.ALLOCATE, key, data, rows=about.size)[0] == Outcome.OK


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("size", [1, 3 * CHUNK_BYTES // 8 + 1])
def test_wrong_requests_are_answered_with_an_error(comm, size):
    """And the server goes on: data that belongs to them is received, and dropped."""

    def work(ask):
        allocate(ask, 0, np.zeros(3))
        for wrong in (
            {"op": Op.CHANGE, "key": 7, "change": Change.ADD},
            {"op": Op.CHANGE, "key": -1, "change": Change.ADD},
            {"op": Op.CHANGE, "key": 0, "change": Change.RULE + 8},
            {"op": Op.CHANGE, "key": 0, "change": Change.ADD},
            {"op": Op.CHANGE_ROWS, "key": 0, "change": Change.ADD, "rows": 99},
            {"op": Op.READ_ROWS, "key": 3},
            {"op": Op.NAME_RULE},
            {"op": 77},
        ):
            outcome, text = ask(data=np.ones(size), **wrong)
            assert outcome == Outcome.FAILED, wrong
            assert text.startswith(b"the server"), text
            outcome, data = ask(Op.READ, 0)
            assert np.frombuffer(data).tolist() == [0.0] * 3

    with_a_server(comm, work)
