"""Which arrays go in which pack and message, told from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist import ReduceOp
from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.arithmetic import Arithmetic, wire_and_result_dtypes
from mpidist.collectives.plans.plan import FusedList, Message, group_by_size, make_fused_lists, make_messages
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions
from mpidist.transport.communicator import Traffic
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.reduction import accumulator_dtype
from mpidist.transport.shared_memory.fused_reducer import FusedReducer, InterNode

pytestmark = pytest.mark.no_mpi

F32, I8, I64 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.int64)
BF16 = np.dtype(ml_dtypes.bfloat16)
SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
OPS = list(ReduceOp)


@dataclass
class Sizes:
    """What a plan asks the levels for."""

    direct_bytes: int = 1 << 20
    pack_bytes: int = 4 << 20

    def message_bytes(self, device: bool) -> tuple[int, int]:
        return self.direct_bytes, self.pack_bytes


def specs(*shapes: int | tuple[int, ...], dtype: np.dtype[Any] = F32) -> list[Spec]:
    return [Spec((shape,) if isinstance(shape, int) else shape, dtype, False) for shape in shapes]


def plan_of(
    arrays: Sequence[Spec],
    op: ReduceOp = SUM,
    num_packs: int = 1,
    num_ranks: int = 4,
    sizes: Any = None,
    bytes_per_pack: int = 0,
    reproducible: bool = False,
    half: np.dtype[Any] | None = None,
    rounds_everywhere: bool = True,
) -> tuple[tuple[Message, ...], int]:
    """The messages of a call, and the number of packs."""
    arithmetic = Arithmetic(op, num_ranks, reproducible, half, half is not None and rounds_everywhere)
    return make_messages(arithmetic, arrays, bytes_per_pack, num_packs, sizes or Sizes())


def sent(arrays: Sequence[Spec], op: ReduceOp = SUM, **how: Any) -> tuple[Message, ...]:
    return plan_of(arrays, op, **how)[0]


def elements(messages: Sequence[Message]) -> list[list[tuple[int, int, int]]]:
    """The messages, each as (array, start, stop)."""
    return [[(piece.index, piece.start, piece.stop) for piece in message.pieces] for message in messages]


def counts(messages: Sequence[Message]) -> list[int]:
    return [message.count for message in messages]


# Sizes in bytes, limit, packs in bytes.
PACKS: list[tuple[list[int], int, list[list[int]]]] = [
    ([128, 32, 800, 4], 200, [[128, 32, 800], [4]]),  # T7
    ([4, 4, 4, 4], 4, [[4, 4], [4, 4]]),
    ([4] * 6, 8, [[4, 4, 4], [4, 4, 4]]),
    ([4, 4, 4], 1, [[4], [4], [4]]),
    ([400, 4, 4], 50, [[400], [4, 4]]),
    ([0, 0, 4, 4], 1, [[0, 0, 4], [4]]),
    ([4, 0, 0], 1, [[4], [0, 0]]),
    ([0, 0], 1, [[0, 0]]),
    ([5, 5, 5], 10**9, [[5, 5, 5]]),
    ([], 10, []),
]


@pytest.mark.parametrize(("sizes", "bytes_per_pack", "packs"), PACKS)
def test_packs_close_once_they_are_larger_than_the_limit(sizes: Any, bytes_per_pack: int, packs: Any) -> None:
    """X21, T7: the table of reference 1.1."""
    grouped = group_by_size(sizes, bytes_per_pack)
    assert [[sizes[index] for index in pack] for pack in grouped] == packs
    assert [index for pack in grouped for index in pack] == list(range(len(sizes)))


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 3, 4, 5, 64, 10**9])
@pytest.mark.parametrize("num_packs", [0, 1, 2, 3, 8, 100])
@pytest.mark.parametrize("sizes", [Sizes(1, 8), Sizes(16, 16), Sizes(40, 24), Sizes()])
def test_every_element_travels_once(bytes_per_pack: int, num_packs: int, sizes: Sizes) -> None:
    values = specs(3, 0, (2, 5), (), 17, (0, 4), 1) + specs(9, (), 6, dtype=I64) + specs(5, dtype=BF16)
    seen = [np.zeros(spec.num_elements, int) for spec in values]
    for message in sent(values, num_packs=num_packs, sizes=sizes, bytes_per_pack=bytes_per_pack):
        assert message.count > 0
        assert message.nbytes == message.count * message.wire.itemsize
        for piece in message.pieces:
            assert values[piece.index].dtype == message.wire
            seen[piece.index][piece.start : piece.stop] += 1
    assert all((times == 1).all() for times in seen)


def test_last_arrays_go_first() -> None:
    """Reference 1.3.2: the last layers' gradients are ready first."""
    assert elements(sent(specs(1, 2, 3), num_packs=0)) == [[(2, 0, 3)], [(1, 0, 2)], [(0, 0, 1)]]


def test_reversal_comes_before_packing() -> None:
    """Reference 1.3.2: the first pack must not be the small one that is left over."""
    assert elements(sent(specs(1, 1, 1), bytes_per_pack=4)) == [[(2, 0, 1), (1, 0, 1)], [(0, 0, 1)]]


def test_arrays_of_one_dtype_travel_together() -> None:
    """X15: whatever the limit; TF concatenates unlike dtypes and fails."""
    values = specs(1) + specs(1, dtype=I64) + specs(1) + specs(1, dtype=I64)
    for bytes_per_pack, expected in ((0, 2), (1, 4), (10**9, 2)):
        messages, num_packs = plan_of(values, bytes_per_pack=bytes_per_pack)
        assert len(messages) == num_packs == expected
        assert {message.wire for message in messages} == {F32, I64}


def test_small_device_arrays_share_a_buffer_across_large_ones() -> None:
    """On the host they go in the order that they are in."""
    values, sizes = specs(3, 500, 4, 600, 5), Sizes(direct_bytes=400, pack_bytes=1 << 20)
    on_host = sent(values, sizes=sizes)
    on_device = sent([spec._replace(device=True) for spec in values], sizes=sizes)
    assert elements(on_host) == [[(4, 0, 5)], [(3, 0, 600)], [(2, 0, 4)], [(1, 0, 500)], [(0, 0, 3)]]
    assert elements(on_device) == [[(3, 0, 600)], [(1, 0, 500)], [(4, 0, 5), (2, 0, 4), (0, 0, 3)]]


def test_integers_of_one_width_share_a_pack_for_their_mean() -> None:
    (message,) = sent(specs(2, dtype=I8) + specs(3, dtype=np.dtype(np.uint16)), MEAN)
    assert (message.count, message.wire, message.is_direct) == (5, np.int32, False)


@pytest.mark.parametrize(
    ("shapes", "num_packs", "expected"),
    [
        ([5, 5, 5], 3, [5, 5, 5]),  # X23
        ([5, 5, 6], 3, [5, 5, 6]),
        ([17], 3, [5, 5, 7]),
        ([1, 1], 8, [2]),  # X22: more packs than elements
        ([2], 2, [1, 1]),
        ([5, 5], 1, [10]),
        ([5, 7], 0, [7, 5]),
        ([0, 0], 4, []),
        ([], 4, []),
        ([4, 0, 4], 2, [4, 4]),
    ],
)
def test_num_packs_cuts_the_concatenation(shapes: list[int], num_packs: int, expected: list[int]) -> None:
    """X22, X23: pieces of total // num_packs, the last with the remainder; 0 does not pack."""
    assert counts(sent(specs(*shapes), num_packs=num_packs)) == expected


def test_packs_cut_arrays_in_order() -> None:
    """X23."""
    assert elements(sent(specs(4, 5), num_packs=2)) == [[(1, 0, 4)], [(1, 4, 5), (0, 0, 4)]]


def test_bytes_per_pack_wins_over_num_packs_and_cuts_no_array() -> None:
    assert elements(sent(specs(9, 1), num_packs=3, bytes_per_pack=1)) == [[(1, 0, 1)], [(0, 0, 9)]]


def test_bytes_per_pack_makes_one_message_of_a_pack() -> None:
    """However large: the user has said how much one message carries."""
    messages, num_packs = plan_of(specs(1000, 1000), sizes=Sizes(16, 16), bytes_per_pack=10**9)
    assert counts(messages) == [2000]
    assert num_packs == 1


def test_large_arrays_are_not_copied_into_a_pack() -> None:
    sizes = Sizes(direct_bytes=40, pack_bytes=400)
    messages = sent(specs(9, 10, 11, 2, 3), sizes=sizes)
    assert [(message.is_direct, message.count) for message in messages] == [
        (False, 5),
        (True, 11),
        (True, 10),
        (False, 9),
    ]


def test_a_lone_array_is_not_copied_into_a_pack() -> None:
    assert [message.is_direct for message in sent(specs(1))] == [True]


def test_packs_are_cut_where_the_pack_buffer_is_full() -> None:
    messages = sent(specs(7, 6), sizes=Sizes(direct_bytes=40, pack_bytes=20))
    assert elements(messages) == [[(1, 0, 5)], [(1, 5, 6), (0, 0, 4)], [(0, 4, 7)]]
    assert not any(message.is_direct for message in messages)


def test_means_of_integers_are_not_reduced_in_place() -> None:
    """Their results have another dtype than their sums; but for 64 bits, which a GPU would have to convert first."""
    for spec, direct in (
        (Spec((100,), I8, False), False),
        (Spec((100,), I64, False), True),
        (Spec((9,), I64, True), False),
    ):
        messages = sent([spec], MEAN, sizes=Sizes(8, 400))
        assert {message.is_direct for message in messages} == {direct}, spec


def test_one_rank_copies_nothing_into_packs() -> None:
    assert all(message.is_direct for message in sent(specs(1, 2, 3), num_ranks=1, sizes=Levels.solo()))


def test_arrays_without_elements_are_not_sent() -> None:
    """X49."""
    assert sent(specs(0, (0, 5), (3, 0))) == ()


def test_no_arrays_make_no_messages() -> None:
    """X1."""
    for op in OPS:
        assert sent([], op) == ()


def test_means_are_divided_once() -> None:
    for message in sent(specs(1, 2), MEAN, num_packs=0, num_ranks=5):
        assert (message.reduction.op, message.reduction.divisor, message.divide_by) == ("sum", 1, 5)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
def test_means_of_half_precision_are_divided_before_they_are_rounded(dtype: np.dtype[Any]) -> None:
    (message,) = sent(specs(3, dtype=dtype), MEAN, num_ranks=5)
    assert (message.reduction.op, message.reduction.divisor, message.divide_by) == ("sum", 5, 1)


@pytest.mark.parametrize("op", [op for op in OPS if op is not MEAN])
def test_other_reductions_divide_by_nothing(op: ReduceOp) -> None:
    for dtype in (F32, BF16, I8):
        (message,) = sent(specs(3, dtype=dtype), op)
        assert (message.reduction.op, message.reduction.divisor, message.divide_by) == (op.name.lower(), 1, 1)


@pytest.mark.parametrize("reproducible", [False, True])
def test_reproducible_asks_for_rank_order(reproducible: bool) -> None:
    (message,) = sent(specs(3), reproducible=reproducible)
    assert message.reduction.in_rank_order is reproducible


@pytest.mark.parametrize("op", [op for op in OPS if op is not MEAN])
@pytest.mark.parametrize("code", "bBhHiIlLqQefdgFDG")
def test_reductions_keep_the_dtype(op: ReduceOp, code: str) -> None:
    dtype = np.dtype(code)
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        with pytest.raises(InvalidArgumentError, match="order"):
            wire_and_result_dtypes(op, dtype)
    else:
        assert wire_and_result_dtypes(op, dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("names", "wire", "result"),
    [
        ("int8 uint8 int16 uint16", "int32", "float32"),
        ("int32", "int64", "float64"),
        ("uint32", "uint64", "float64"),
        ("int64 uint64", "float64", "float64"),
        *((name, name, name) for name in ("float16", "float32", "float64", "longdouble", "complex64", "complex128")),
    ],
)
def test_means_of_integers_are_floats(names: str, wire: str, result: str) -> None:
    """X5, reference 1.2.7."""
    for name in names.split():
        assert wire_and_result_dtypes(MEAN, np.dtype(name)) == (np.dtype(wire), np.dtype(result))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
def test_low_precision_is_made_of_numbers(op: ReduceOp, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert wire_and_result_dtypes(op, dtype) == (dtype, dtype)
    assert accumulator_dtype(dtype) == np.float32


# Their characters are those of dtypes of NumPy, or their kind is.
OF_OTHERS = [
    getattr(ml_dtypes, name) for name in ("int4", "uint4", "uint1", "float8_e8m0fnu") if name in dir(ml_dtypes)
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["?", "U3", "S3", "O", "M8[s]", "m8[s]", "f4,i4", "V4", *OF_OTHERS])
def test_what_is_no_number_is_refused(op: ReduceOp, dtype: Any) -> None:
    """X7. Only the least and the greatest of booleans are booleans."""
    if dtype == "?" and op in (ReduceOp.MIN, ReduceOp.MAX):
        assert wire_and_result_dtypes(op, np.dtype(dtype)) == (np.bool_, np.bool_)
        return
    with pytest.raises(InvalidArgumentError, match=f"{op} needs numbers, got dtype"):
        wire_and_result_dtypes(op, np.dtype(dtype))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec((2, 3), F32, False), "f32[2,3]"),
        (Spec((), I64, False), "i64[]"),
        (Spec((0,), BF16, True), "bf16[0] on a GPU"),
        (Spec((1,), np.dtype(np.complex64), False), "c64[1]"),
    ],
)
def test_specs_are_short_to_read(spec: Spec, text: str) -> None:
    assert repr(spec) == text


@pytest.mark.parametrize("half", [np.dtype(np.float16), BF16], ids=str)
def test_float32_travels_in_half_precision_where_every_rank_rounds(half: np.dtype[Any]) -> None:
    """In packs of its own: what is rounded for the way is not what the program has in half precision."""
    values = specs(3) + specs(4, dtype=half) + specs(5, dtype=np.dtype(np.float64)) + specs(6)
    for op in (SUM, MEAN):
        messages = sent(values, op, half=half)
        assert [(message.wire, message.is_compressed) for message in messages] == [
            (half, True),
            (np.float64, False),
            (half, False),
        ]
        assert [[piece.index for piece in message.pieces] for message in messages] == [[3, 0], [2], [1]]
        assert [message.reduction.counts_overflow for message in messages] == [True, False, False]
        assert not messages[0].is_direct
        assert messages[0].divide_by == 1, "a mean is divided before it is rounded"
        assert messages[0].reduction.divisor == (4 if op is MEAN else 1)
    assert {message.wire for message in sent(values, half=half, rounds_everywhere=False)} == {
        F32,
        half,
        np.dtype(np.float64),
    }


# Lists for a transport of fused arrays.


def reducer_of(least_bytes: int | None = None) -> FusedReducer:
    """One on one node, or, if messages between nodes are worth it from some bytes on, on several."""
    across = None if least_bytes is None else InterNode(None, least_bytes, True)
    return FusedReducer(Slots(None, 1 << 20), 1, 0, Traffic(), across)


def fused(
    arrays: Sequence[Spec],
    op: ReduceOp = SUM,
    num_ranks: int = 4,
    reproducible: bool = False,
    half: np.dtype[Any] | None = None,
    rounds_everywhere: bool = False,
    least_bytes: int | None = None,
) -> tuple[FusedList, ...] | None:
    arithmetic = Arithmetic(op, num_ranks, reproducible, half, rounds_everywhere)
    return make_fused_lists(arithmetic, arrays, reducer_of(least_bytes))


def by_wire(arrays: Sequence[Spec], op: ReduceOp = SUM, **how: Any) -> dict[np.dtype[Any], FusedList]:
    """The lists of a call, by the dtype in which they travel."""
    lists = fused(arrays, op, **how)
    assert lists is not None
    return {its.wire: its for its in lists}


def test_lists_hold_every_array_once_last_first_by_dtype() -> None:
    arrays = [*specs(3, (2, 2)), *specs(5, dtype=I64), *specs(0, 7)]
    assert [(its.wire, its.indices, its.lengths) for its in fused(arrays) or ()] == [
        (F32, (4, 1, 0), (7, 4, 3)),
        (I64, (2,), (5,)),
    ]


def test_a_list_has_its_whole_length() -> None:
    values = specs(3, 0, (2, 5), (), 17, (0, 4)) + specs(9, (), 6, dtype=I64) + specs(5, 0, dtype=BF16)
    lists = by_wire(values)
    assert {wire: its.indices for wire, its in lists.items()} == {F32: (4, 3, 2, 0), I64: (8, 7, 6), BF16: (9,)}
    assert {wire: its.lengths for wire, its in lists.items()} == {F32: (17, 1, 10, 3), I64: (6, 1, 9), BF16: (5,)}
    for wire, its in lists.items():
        assert (its.result_dtype, its.divide_by, its.half) == (wire, 1, None)
        assert its.count == its.schedule.count == sum(its.lengths)
        assert its.nbytes == its.count * wire.itemsize


def test_lists_of_a_mean_say_what_travels_and_what_comes_back() -> None:
    (integers,) = fused(specs(3, dtype=I8), MEAN) or ()
    assert (integers.wire, integers.result_dtype, integers.divide_by) == (np.int32, np.float32, 4)
    assert not integers.keeps_dtype
    assert by_wire(specs(3), MEAN)[F32].keeps_dtype


def test_arrays_without_elements_make_no_list() -> None:
    """X1, X49."""
    for op in OPS:
        assert fused([], op) == ()
        assert fused(specs(0, (0, 5), (3, 0)), op) == ()


def test_lists_of_one_shape_are_known() -> None:
    """Empty arrays are not in them, and do not count."""
    assert by_wire(specs((2, 3), (2, 3), 0))[F32].is_uniform
    assert not by_wire(specs((2, 3), (3, 2)))[F32].is_uniform
    assert not by_wire(specs((), ()))[F32].is_uniform


def test_lists_of_means_are_divided_once() -> None:
    """Of integers in the wider dtype that they travel in; of halves before they are rounded."""
    values = specs(1) + specs(2, dtype=I8) + specs(3, dtype=np.dtype(np.uint16)) + specs(4, dtype=BF16)
    lists = by_wire(values, MEAN, num_ranks=5)
    integers, halves = lists[np.dtype(np.int32)], lists[BF16]
    assert (integers.result_dtype, integers.indices) == (np.float32, (2, 1))
    for its in (lists[F32], integers):
        assert (its.reduction.op, its.reduction.divisor, its.divide_by) == ("sum", 1, 5)
    assert (halves.reduction.op, halves.reduction.divisor, halves.divide_by) == ("sum", 5, 1)


@pytest.mark.parametrize("op", [op for op in OPS if op is not MEAN])
def test_lists_of_other_reductions_are_divided_by_nothing(op: ReduceOp) -> None:
    for dtype in (F32, BF16, I8):
        its = by_wire(specs(3, dtype=dtype), op, reproducible=True)[dtype]
        assert (its.reduction.op, its.reduction.divisor, its.divide_by) == (op.name.lower(), 1, 1)
        assert its.reduction.in_rank_order


def test_device_arrays_are_not_fused() -> None:
    assert fused([Spec((3,), F32, True), *specs(3)]) is None


def test_what_every_rank_rounds_is_not_fused() -> None:
    """Other arrays of such a call neither; but without float32 there is nothing to round."""
    values = specs(3, dtype=I64)
    assert fused([*values, *specs(3)], half=BF16, rounds_everywhere=True) is None
    assert fused(values, half=BF16, rounds_everywhere=True) is not None


def test_lists_are_rounded_between_nodes_alone() -> None:
    """Float32 is, and nothing else."""
    values = specs(3) + specs(3, dtype=np.dtype(np.float64)) + specs(3, dtype=BF16)
    assert {wire: its.half for wire, its in by_wire(values, half=BF16, least_bytes=0).items()} == {
        F32: BF16,
        np.dtype(np.float64): None,
        BF16: None,
    }
    assert {its.half for its in by_wire(values, half=BF16).values()} == {None}


def test_partial_sums_of_halves_do_not_cross_nodes_in_rank_order() -> None:
    """They would be rounded on the way."""
    halves = specs(3) + specs(3, dtype=BF16)
    assert fused(halves, reproducible=True, least_bytes=0) is None
    assert fused(halves, reproducible=True) is not None
    assert fused(halves, least_bytes=0) is not None
    assert fused(specs(3), reproducible=True, least_bytes=0) is not None


def test_too_few_bytes_for_messages_between_nodes_are_not_fused() -> None:
    """All lists of a call count."""
    values = specs(3) + specs(1, dtype=I64)
    assert fused(values, least_bytes=20) is not None
    assert fused(values, least_bytes=21) is None


def test_without_shared_memory_nothing_is_fused() -> None:
    for kind in (CollectiveAllReduce, HierarchicalCopyAllReduce):
        algorithm = BoundOps(kind(), SyncGroup.solo())
        assert algorithm.fused_reducer_for(CommunicationOptions(), Levels.solo()) is None
        shared = replace(Levels.solo(), fused=reducer_of())
        assert algorithm.fused_reducer_for(CommunicationOptions(), shared) is shared.fused
