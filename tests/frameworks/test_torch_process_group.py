"""The calls of torch.distributed over the backend `mpidist`: results, dtypes, groups of some ranks, and errors."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.everywhere import raises_everywhere
from support.process_groups import open_process_group
from torch.distributed import _make_nccl_premul_sum  # for NCCL alone

from mpidist.errors import DeadlineExceededError, InvalidArgumentError

# Names that torch replaces by newer ones, which oldest versions do not have.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

_FLOATS = "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"
_INTEGERS = "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"
COPIED = [getattr(torch, name) for name in (*_FLOATS, *_INTEGERS)]
REDUCED = [dtype for dtype in COPIED if not str(dtype).startswith("torch.float8")]


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape or (3,), value, dtype=dtype)


def equal(result, wanted):
    assert result.tolist() == wanted


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_all_reduce_has_the_sum_of_every_dtype(ranks, dtype):
    rank, size = ranks
    value = torch.tensor([[rank, 1], [0, 0]]).to(dtype).t()  # not in row-major order
    dist.all_reduce(value)
    wanted = torch.tensor([[sum(range(size)), size], [0, 0]]).t()
    assert torch.equal(value, wanted.to(dtype))


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("AVG", 0.5), ("MIN", 0), ("MAX", 1), ("PRODUCT", 0)],
)
def test_all_reduce_has_the_result_of_every_operation(ranks, op, wanted):
    rank, size = ranks
    value = full(rank / max(1, size - 1), 3, 2).t()
    dist.all_reduce(value, getattr(dist.ReduceOp, op))
    equal(value, [[wanted if size > 1 else 0] * 3] * 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint32, torch.int64], ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["now", "later"])
def test_all_reduce_has_the_mean_of_integers_rounded_towards_zero(ranks, dtype, is_async):
    """As NCCL's; Lightning takes such a mean of the sizes of batches."""
    rank, size = ranks
    sign = -1 if dtype.is_signed else 1
    value, one = torch.tensor([[sign * rank, 7], [10 + rank, 0]]).to(dtype).t(), torch.tensor(rank).to(dtype)
    works = [dist.all_reduce(each, dist.ReduceOp.AVG, async_op=is_async) for each in (value, one)]
    assert all(work is None or work.wait() for work in works)
    mean = sum(range(size)) // size
    equal(value, [[sign * mean, 10 + mean], [7, 0]])
    equal(one, mean)


@pytest.mark.ranks(2, 3)
def test_all_reduce_compares_a_mean_of_integers_with_a_sum(ranks, comm):
    op = dist.ReduceOp.AVG if ranks[0] else dist.ReduceOp.SUM
    with raises_everywhere(comm, InvalidArgumentError, "all_reduce AVG of integers"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), op)


def test_reduce_refuses_the_mean_of_integers(ranks, comm):
    """A mean of floating-point numbers would have rounded the large ones."""
    large = torch.full((2,), 2**61 + 1)
    with raises_everywhere(comm, ValueError, "AVG of integers: only all_reduce has it; use SUM"):
        dist.reduce(large, 0, dist.ReduceOp.AVG)
    with raises_everywhere(comm, ValueError, "AVG of integers: only all_reduce has it; use SUM"):
        dist.reduce_scatter_tensor(large[:1], large.repeat(ranks[1])[: ranks[1]], dist.ReduceOp.AVG)


def test_all_reduce_divides_integers_of_8_bits_by_more_ranks_than_they_count(ranks, monkeypatch):
    monkeypatch.setattr(dist.group.WORLD, "_size", 200)
    value = torch.tensor([100 // ranks[1], -100 // ranks[1]], dtype=torch.int8)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    equal(value, [0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["now", "later"])
def test_all_reduce_of_sparse_tensors_has_the_dense_sum(ranks, dtype, is_async):
    rank, size = ranks
    places = torch.tensor([[rank, 1, 1][: rank + 1], [0, 2, 2][: rank + 1]])
    everyone = [torch.tensor([1, 2, 3, 4][: min(3, one + 1)]).to(dtype) for one in range(size)]
    value = torch.sparse_coo_tensor(places, everyone[rank], (size + 2, 3), check_invariants=True)
    wanted = value.to_dense()
    dist.all_reduce(wanted)
    work = dist.all_reduce(value, async_op=is_async)
    assert work is None or work.wait()
    assert value.is_sparse
    assert torch.equal(value.to_dense(), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool], ids=str)
def test_all_reduce_combines_bits(ranks, dtype):
    rank, size = ranks
    value = torch.tensor([1 << rank, 1, rank]).to(dtype)
    everyone = [torch.tensor([1 << one, 1, one]).to(dtype) for one in range(size)]
    for op, combine in {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}.items():
        result, wanted = value.clone(), everyone[0]
        for one in everyone[1:]:
            wanted = combine(wanted, one)
        dist.all_reduce(result, getattr(dist.ReduceOp, op))
        assert torch.equal(result, wanted)


def test_all_reduce_is_one_call_if_waited_for_now_or_later(ranks):
    rank, size = ranks
    value = full(1.0)
    works = [dist.all_reduce(value, async_op=rank > 0) for _ in range(3)]
    assert all(work is None or work.wait() for work in works)
    equal(value, [size**3] * 3)


def test_calls_of_single_tensors_take_operation_and_root_without_options(ranks):
    rank, size = ranks
    group, of_max, last = dist.group.WORLD, dist.ReduceOp.MAX, size - 1
    values = [full(rank) for _ in range(5)]
    rows, part, sums = [torch.zeros(1) for _ in range(size)], full(0, 1), full(0, 1)
    parts = [full(one, 1) for one in range(size)]
    works = [
        group.allreduce(values[0]),
        group.allreduce(values[1], of_max),
        group.allreduce([values[2]], op=of_max),
        group.broadcast(values[3], last),
        group.reduce(values[4], last, of_max, timedelta(seconds=60)),
        group.allgather(rows, full(rank, 1)),
        group.scatter(part, parts if rank == last else [], last),
        group.reduce_scatter(sums, parts, of_max),
        group.barrier(timeout=timedelta(seconds=60)),
    ]
    assert all(work.wait() for work in works)
    assert [int(one[0]) for one in values[:4]] == [sum(range(size)), last, last, last]
    assert [int(one) for one in (*rows, part, sums)] == [*range(size), rank, rank]


def test_reduce_gives_one_rank_the_sum(ranks, placement):
    rank, size = ranks
    value = full(rank)
    dist.reduce(value, size - 1)
    equal(value, [sum(range(size)) if rank == size - 1 else rank] * 3)


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_copies_keep_every_dtype(ranks, dtype):
    rank, size = ranks
    each = [full(one % 2, 2, 1).to(dtype) for one in range(size)]
    value = each[rank].clone()
    dist.broadcast(value, size - 1)
    assert torch.equal(_bits(value), _bits(each[-1]))
    outs = [torch.empty_like(value) for _ in each]
    dist.all_gather(outs, each[rank])
    assert all(map(torch.equal, map(_bits, outs), map(_bits, each)))
    out = torch.empty(size, 2, dtype=dtype).t()  # not in row-major order
    dist.all_gather_into_tensor(out.t(), each[rank].t())
    assert torch.equal(_bits(out.t().contiguous()), _bits(torch.cat([one.t() for one in each])))


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "later"])
def test_reduce_scatter_gives_each_rank_its_part(ranks, is_async):
    rank, size = ranks
    out = torch.zeros(2)
    work = dist.reduce_scatter_tensor(out, torch.arange(2.0 * size), async_op=is_async)
    assert (work is not None) == is_async
    assert work is None or work.wait()
    equal(out, [size * 2 * rank, size * (2 * rank + 1)])
    parts = [full(one, 2, 1).expand(2, 2) for one in range(size)]
    target = torch.zeros(2, 2).t()
    dist.reduce_scatter(target, parts, dist.ReduceOp.AVG)
    equal(target, [[rank] * 2] * 2)


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "later"])
def test_reduce_scatter_takes_parts_of_other_lengths(ranks, is_async):
    rank, size = ranks
    for dtype in (torch.float32, torch.bool, torch.complex64):
        parts = [torch.full((2, one), rank + 1).to(dtype) for one in range(size)]
        out = torch.zeros(rank, 2, dtype=dtype).t()
        work = dist.reduce_scatter(out, parts, async_op=is_async)
        assert work is None or work.wait()
        assert torch.equal(out, torch.full((2, rank), sum(range(size + 1))).to(dtype))
        assert all(part.eq(torch.tensor(rank + 1).to(dtype)).all() for part in parts)


def test_gather_and_scatter_have_their_tensors(ranks, placement):
    rank, size = ranks
    outs = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(full(rank, 1), outs, 0)
    assert outs is None or torch.cat(outs).tolist() == list(range(size))
    out = full(0, 1, dtype=torch.bfloat16)
    parts = [full(2 * one, 1, dtype=torch.bfloat16) for one in range(size)] if rank == size - 1 else None
    dist.scatter(out, parts, size - 1)
    equal(out, [2 * rank])


def test_all_to_all_has_the_parts_of_all_ranks(ranks, placement):
    rank, size = ranks
    each = list(range(size))
    outs = [torch.zeros(1) for _ in each]
    dist.all_to_all(outs, [full(10 * rank + one, 1) for one in each])
    equal(torch.cat(outs), [10 * one + rank for one in each])
    out = torch.empty(sum(each) if rank else 0, dtype=torch.int64)  # `one` numbers of rank `one`, and none for rank 0
    sizes = [0] + [rank] * (size - 1)
    dist.all_to_all_single(out, full(rank, sum(sizes), dtype=torch.int64), each if rank else [0] * size, sizes)
    equal(out, [one for one in each for _ in range(one)] if rank else [])
    columns, in_place = torch.zeros(2, size), torch.tensor([10 * rank + one for one in each])
    dist.all_to_all(list(columns.T), [full(10 * rank + one, 2) for one in each])
    dist.all_to_all_single(in_place, in_place)
    equal(torch.cat([columns[0], columns[1], in_place]), 3 * [10 * one + rank for one in each])


def test_empty_tensors_and_scalars_are_values(ranks):
    rank, size = ranks
    for value in (torch.empty(0), torch.empty(2, 0)):
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        dist.all_gather_into_tensor(torch.empty(0), value.reshape(-1))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))
    dist.broadcast(scalar.fill_(rank), size - 1)
    assert scalar.item() == size - 1


def test_single_element_of_any_stride_is_copied(ranks):
    """As the first column of a batch of one row, which is in row-major order."""
    rank, size = ranks
    column, parts = full(rank, 1, 2)[:, 0], [full(one, 1, 2)[:, 0] for one in range(size)]
    dist.all_gather(rows := [torch.zeros(1, 2)[:, 0] for _ in range(size)], column)
    dist.scatter(part := torch.zeros(1, 2)[:, 0], parts if rank == 0 else None, 0)
    dist.broadcast(column, size - 1)
    equal(torch.cat([*rows, part, column]), [*range(size), rank, size - 1])


def test_coalesced_calls_have_the_results_of_single_ones(ranks):
    rank, size = ranks
    values = [full(rank), full(2 * rank, 2)]
    dist.all_reduce_coalesced(values)
    assert [one.tolist() for one in values] == [[sum(range(size))] * 3, [2 * sum(range(size))] * 2]
    group = dist.group.WORLD
    outs = [torch.empty(size), torch.empty(2 * size)]
    group.allgather_into_tensor_coalesced(outs, [full(rank, 1), full(rank, 2)]).wait()
    assert [one.tolist() for one in outs] == [list(range(size)), [one for one in range(size) for _ in range(2)]]
    outs = [torch.empty(1), torch.empty(2)]
    group.reduce_scatter_tensor_coalesced(outs, [full(1, size), full(rank, 2 * size)]).wait()
    assert [one.tolist() for one in outs] == [[size], [sum(range(size))] * 2]


def test_functional_collectives_have_their_results(ranks):
    from torch.distributed import _functional_collectives as calls

    rank, size = ranks
    group = list(range(size))
    equal(calls.all_reduce(full(rank), "sum", group).wait(), [sum(group)] * 3)
    equal(calls.all_gather_tensor(full(rank, 1), 0, group).wait(), group)
    equal(calls.reduce_scatter_tensor(torch.arange(1.0 * size), "sum", 0, group).wait(), [size * rank])
    equal(calls.broadcast(full(rank, 1), size - 1, group).wait(), [size - 1])
    results = calls.all_reduce_coalesced([full(rank), full(1.0, 1)], "sum", group)
    assert [one.wait().tolist() for one in results] == [[sum(group)] * 3, [size]]


def test_calls_show_in_the_profiler(ranks):
    with torch.profiler.profile() as profile:
        dist.all_reduce(full(1.0))
        dist.broadcast(full(1.0), 0)
    assert {"mpidist:all_reduce", "mpidist:broadcast"} <= {event.key for event in profile.key_averages()}


@pytest.mark.ranks(min=2)
def test_messages_arrive(ranks, placement):
    rank, size = ranks
    if rank == 0:
        dist.send(full(7.0, 1), 1)
    if rank == 1:
        value = torch.zeros(1)
        assert dist.recv(value) == 0  # from any rank
        equal(value, [7])
    value, last = torch.zeros(2, 2).t(), (rank - 1) % size
    sent = dist.isend(full(rank, 2, 2), (rank + 1) % size)
    dist.irecv(value, last).wait()
    sent.wait()
    equal(value, [[last] * 2] * 2)
    out = torch.zeros(1)
    exchange = [dist.P2POp(dist.isend, full(rank, 1), (rank + 1) % size), dist.P2POp(dist.irecv, out, last)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    equal(out, [last])


@pytest.mark.ranks(min=2)
def test_message_of_no_rank_or_no_tag_of_mpi_is_refused(ranks):
    rank, size = ranks
    other = (rank + 1) % size
    for peer, tag in [(-1, 0), (-2, 0), (size, 0), (other, -1), (other, -2), (other, 2**31 - 1)]:
        for call in (dist.isend, dist.irecv):
            with pytest.raises(InvalidArgumentError, match=f"rank {peer}, tag {tag}, needs 0 <= rank < {size}"):
                call(torch.ones(1), peer, tag=tag)
    test_all_to_all_has_the_parts_of_all_ranks(ranks, None)  # whose messages are of other tags


@pytest.mark.ranks(min=3)
def test_groups_of_some_ranks_leave_the_world_usable(ranks, placement):
    rank, size = ranks
    sets = ((1, 2), (0, 1), (0, 2)) if size == 3 else ((0, 1), (2, 3), (1, 2, 3))
    for turn in range(6):
        groups = {some: dist.new_group(list(some)) for some in sets}  # all at a time
        for some, group in groups.items():
            if rank in some:
                value = full(rank)
                dist.all_reduce(value, group=group)
                equal(value, [sum(some)] * 3)
                if turn % 2:
                    dist.destroy_process_group(group)
            value = full(1.0)
            dist.all_reduce(value)
            equal(value, [size] * 3)
            dist.barrier()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.all_reduce(torch.zeros(2 + rank)),
        lambda rank: dist.all_reduce(torch.zeros(2), dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX),
        lambda rank: dist.all_reduce(torch.zeros(2, dtype=torch.float32 if rank else torch.float64)),
        lambda rank: dist.all_reduce(torch.eye(2).to_sparse() if rank else torch.eye(2)),
        lambda rank: dist.broadcast(torch.zeros(2), int(rank == 0)),
        lambda rank: dist.barrier() if rank else dist.all_reduce(torch.zeros(2)),
        lambda rank: dist.gather(torch.zeros(2 + rank), [torch.zeros(2)] * dist.get_world_size() if not rank else None),
        lambda rank: dist.scatter(torch.zeros(2), [torch.zeros(3)] * dist.get_world_size() if rank == 1 else None, 1),
        lambda rank: dist.reduce_scatter(
            torch.zeros(2), [torch.zeros(2 + (rank == 1)), *[torch.zeros(2)] * (dist.get_world_size() - 1)]
        ),
        lambda rank: dist.all_to_all(
            [torch.zeros(2)] * dist.get_world_size(), [torch.zeros(2 + (rank == 1))] * dist.get_world_size()
        ),
    ],
    ids=["shape", "op", "dtype", "sparse", "root", "call", "gather", "scatter", "reduce_scatter", "all_to_all"],
)
def test_mismatch_raises_on_every_rank(ranks, comm, call):
    with raises_everywhere(comm, InvalidArgumentError, "ranks? 1"):
        call(comm.rank)
    dist.barrier()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "call",
    [
        lambda size, more: dist.all_gather_into_tensor(torch.zeros(size + more), torch.zeros(1)),
        lambda size, more: dist.all_gather([torch.zeros(1 + more)] * size, torch.zeros(1)),
        lambda size, more: dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(size + more)),
        lambda size, more: dist.reduce_scatter(
            torch.zeros(2), [torch.zeros(2 - more), torch.zeros(2 + more), *[torch.zeros(2)] * (size - 2)]
        ),
        lambda size, more: dist.all_to_all_single(torch.zeros(size), torch.zeros(size + more)),
        lambda size, more: dist.all_gather([torch.zeros(1)] * (size + more), torch.zeros(1)),
        lambda size, more: dist.all_gather_into_tensor(
            torch.zeros(size, dtype=[None, torch.int][more]), torch.zeros(1)
        ),
        lambda size, more: dist.gather(torch.zeros(1), [torch.zeros(1)] * (size - 1) if more else None, 1),
        lambda size, more: dist.scatter(torch.zeros(1), [torch.zeros(1)] * (size + 1) if more else None, 1),
        lambda size, more: dist.broadcast(torch.zeros(2, device="meta" if more else "cpu"), 0),
        lambda size, more: dist.all_to_all_single(torch.zeros(size), torch.zeros(size, device=["cpu", "meta"][more])),
        lambda size, more: dist.all_reduce(torch.eye(2).to_sparse_csr() if more else torch.eye(2)),
        lambda size, more: dist.all_reduce(torch.zeros(1), dist.ReduceOp.BAND if more else dist.ReduceOp.SUM),
        lambda size, more: dist.group.WORLD.allgather_into_tensor_coalesced(
            [torch.zeros(size)] * (1 + more), [torch.zeros(1)]
        ).wait(),
        lambda size, more: dist.all_reduce(torch.sparse_coo_tensor([[99 * more]], [1.0], (4,), check_invariants=False)),
    ],
    ids=[
        "all_gather_single",
        "all_gather",
        "reduce_scatter_single",
        "reduce_scatter",
        "all_to_all_single",
        "all_gather_long",
        "all_gather_dtype",
        "gather_short",
        "scatter_long",
        "device",
        "device_of_parts",
        "layout",
        "all_reduce",
        "coalesced",
        "sparse_index",
    ],
)
def test_bad_arguments_of_one_rank_raise_on_every_rank(ranks, comm, call):
    rank, size = ranks
    with raises_everywhere(comm, InvalidArgumentError, "rank 1(?!.*ModuleNotFound)"):
        call(size, int(rank == 1))
    dist.barrier()


@pytest.mark.ranks(min=2)
def test_call_that_no_rank_can_make_raises_alike_on_every_rank(ranks, comm):
    with raises_everywhere(comm, ValueError, r"^the input has 1 elements, the output 1 of \[1\] by rank"):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    with raises_everywhere(comm, ValueError, "reduce_op RedOpType.PREMUL_SUM is not supported here"):
        dist.all_reduce(torch.ones(1), _make_nccl_premul_sum(2.0))


def test_root_that_is_no_rank_raises_on_every_rank(ranks, comm):
    calls = (dist.broadcast, ()), (dist.reduce, ()), (dist.gather, (None,)), (dist.scatter, (None,))
    for root in (-1, ranks[1]):
        for call, lists in calls:
            with raises_everywhere(comm, ValueError, f"rank {root}"):
                call(torch.ones(1), *lists, root)
    dist.barrier()


def test_output_that_cannot_be_written_raises_there_and_leaves_the_group_usable(ranks):
    rank, size = ranks
    for call in (lambda out: dist.broadcast(out, 0), lambda out: dist.all_gather([out] * size, torch.ones(3))):
        if rank == size - 1:
            with pytest.raises(RuntimeError, match="single memory location"):
                call(torch.ones(1).expand(3))
        else:
            call(torch.ones(3))
    value = torch.ones(2)
    dist.all_reduce(value)
    equal(value, [size] * 2)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("count", [1, 4])
def test_message_of_another_length_raises_and_leaves_the_group_usable(ranks, count):
    rank, _ = ranks
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="recv from rank 1"):
            dist.recv(torch.zeros(count), 1)
    if rank == 1:
        dist.send(torch.ones(2), 0)
    dist.barrier()


@pytest.mark.ranks(min=2)
def test_late_rank_is_named_at_the_timeout(comm, tmp_path):
    with open_process_group(comm, tmp_path):
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=2))
        if comm.rank == 1:
            comm.barrier()
        with pytest.raises(DeadlineExceededError, match="rank 1" if comm.rank != 1 else "had given up") as caught:
            dist.all_reduce(torch.zeros(2))
        if comm.rank != 1:
            assert "until destroy_process_group() and init_process_group()" in str(caught.value)
            comm.barrier()
