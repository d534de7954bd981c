"""Calls of torch.distributed with `async_op=True`: programs that wait for them late, in any order, or never."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.everywhere import raises_everywhere
from support.process_groups import open_process_group

from mpidist.errors import DeadlineExceededError, InvalidArgumentError

# Names that torch replaces by newer ones.
pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.filterwarnings("ignore::FutureWarning")]

COUNT = 1 << 20  # several chunks of shared memory, and no message that is sent before it is received


def full(value, count=COUNT):
    return torch.full((count,), float(value))


def is_gathered(out, size):
    return bool((out.reshape(size, -1) == torch.arange(float(size))[:, None]).all())


def gather(rank, size, group=None):
    out = torch.empty(size * COUNT)
    return out, dist.all_gather_into_tensor(out, full(rank), group=group, async_op=True)


@pytest.mark.parametrize(
    "start",
    [lambda value, late: dist.broadcast(value, 0, async_op=late), lambda value, late: dist.barrier(async_op=late)],
    ids=["broadcast", "barrier"],
)
@pytest.mark.parametrize("has_sent_first", [True, False], ids=["send", "recv"])
def test_started_call_lets_a_message_pass(placement, ranks, start, has_sent_first):
    rank, _ = ranks
    value, message = full(5.0 * (rank == 0)), full(3)
    if rank == 0:
        work = start(value, True)
        dist.send(message, 1) if has_sent_first else dist.recv(message, 1)
        work.wait()
    elif has_sent_first:
        dist.recv(message, 0) if rank == 1 else None
        start(value, False)
    else:
        start(value, False)
        dist.send(message, 0) if rank == 1 else None
    assert message.eq(3).all()


def test_started_calls_of_two_groups_may_come_in_another_order_on_each_rank(placement, ranks):
    rank, size = ranks
    groups = dist.new_group(), dist.new_group()
    works = [gather(rank, size, group) for group in groups[:: 1 if rank % 2 else -1]]
    for out, work in works:
        work.wait()
        assert is_gathered(out, size)
    if rank == 0:
        out, work = gather(rank, size, groups[0])
        dist.barrier(groups[1])
    else:
        dist.barrier(groups[1])
        out, work = gather(rank, size, groups[0])
    work.wait()
    assert is_gathered(out, size)


@pytest.mark.ranks(2)
def test_started_calls_and_another_groups_thread_do_not_meet(placement, ranks):
    rank, size = ranks
    group = dist.new_group()  # between nodes, a thread advances its all-reduces
    for _ in range(20):
        values = [full(1, 1 << 16) for _ in range(4)]
        works = [dist.all_reduce(value, group=group, async_op=True) for value in values]
        outs = [gather(rank, size) for _ in range(2)]
        for work in (*(work for _, work in outs), *works):
            work.wait()
        assert all(is_gathered(out, size) for out, _ in outs)
        assert all(value.eq(size).all() for value in values)


def test_started_calls_have_their_results_in_any_order(placement, ranks):
    rank, size = ranks
    exchanged, scattered, bits = torch.empty(size), torch.empty(2), torch.tensor([1 << rank])
    sums, part, listed = full(rank, 5), torch.empty(COUNT), [torch.empty(1) for _ in range(size)]
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    lists = [full(one, 2) for one in range(size)] if rank == 0 else None
    works = [
        dist.all_to_all_single(exchanged, full(rank, size), async_op=True),
        dist.scatter(scattered, lists, 0, async_op=True),
        dist.reduce_scatter_tensor(part, torch.ones(size * COUNT), async_op=True),
        dist.all_reduce(bits, dist.ReduceOp.BOR, async_op=True),
        dist.reduce(sums, 0, async_op=True),
        dist.all_gather(listed, full(rank, 1), async_op=True),
        dist.gather(full(rank, 1), gathered, 0, async_op=True),
    ]
    for work in works[:: 1 if rank % 2 else -1]:
        work.wait()
    assert exchanged.tolist() == [one.item() for one in listed] == [*range(size)]
    assert scattered.tolist() == [rank] * 2
    assert part.eq(size).all()
    assert bits.item() == 2**size - 1
    assert sums.tolist() == [sum(range(size)) if rank == 0 else rank] * 5
    assert gathered is None or torch.cat(gathered).tolist() == [*range(size)]


def test_started_call_is_one_with_a_call_at_once_and_needs_no_wait(ranks):
    rank, size = ranks
    out = torch.empty(size * COUNT)
    work = dist.all_gather_into_tensor(out, full(rank), async_op=rank == 0)
    while work is not None and not work.is_completed():
        pass
    assert is_gathered(out, size)
    value = full(rank)
    dist.broadcast(value, 1, async_op=True)
    dist.barrier()
    assert value.eq(1).all()


def test_started_calls_that_differ_raise_with_their_lines_on_every_rank_that_waits(ranks, comm):
    rank, size = ranks
    if rank == size - 1:
        work = dist.broadcast(torch.zeros(2), 0, async_op=True)
    else:
        work = dist.broadcast(torch.zeros(3), 0, async_op=True)
    with raises_everywhere(
        comm, InvalidArgumentError, r"broadcast.*line: (rank.*_started\.py:\d+ in test_started.*){2}"
    ):
        work.wait()
    dist.barrier()


def test_started_call_late_rank_is_named_at_the_timeout_after_a_message(comm, tmp_path):
    with open_process_group(comm, tmp_path):
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=2))
        if comm.rank == 1:
            dist.send(torch.ones(1), 0)
            comm.barrier()
        work = dist.broadcast(torch.zeros(2), 0, async_op=True)
        if comm.rank == 0:
            dist.recv(torch.zeros(1), 1)
        text = "had given up" if comm.rank == 1 else r"broadcast \(call 2\) .*rank 1"
        with pytest.raises(DeadlineExceededError, match=text):
            work.wait()
        if comm.rank != 1:
            comm.barrier()


@pytest.mark.ranks(2)
def test_started_call_of_another_thread_is_left_to_it(ranks, comm):
    rank, size = ranks
    if rank == 1:
        comm.barrier()  # the call of rank 0 is not over before
    out, work = gather(rank, size)
    if rank == 0:
        with ThreadPoolExecutor(1) as other:
            other.submit(work.is_completed).result()
            with pytest.raises(RuntimeError, match="wait for it in that thread"):
                other.submit(work.wait).result()
        comm.barrier()
    assert work.wait()
    assert is_gathered(out, size)
