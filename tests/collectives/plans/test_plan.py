"""Which arrays go in which pack and message, told from shapes and dtypes alone."""

from dataclasses import dataclass
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from mpidist import ReduceOp
from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.arithmetic import Arithmetic, wire_and_result_dtypes
from mpidist.collectives.plans.plan import group_by_size, make_fused_lists, make_messages
from mpidist.errors import InvalidArgumentError
from mpidist.transport.communicator import Traffic
from mpidist.transport.group.levels import Levels
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

    def message_bytes(self, device):
        return self.direct_bytes, self.pack_bytes


def specs(*shapes, dtype=F32):
    return [Spec((shape,) if isinstance(shape, int) else shape, dtype, False) for shape in shapes]


def plan_of(
    arrays,
    op=SUM,
    num_packs=1,
    num_ranks=4,
    sizes=None,
    bytes_per_pack=0,
    reproducible=False,
    half=None,
    rounds_everywhere=True,
):
    """The messages of a call, and the number of packs."""
    arithmetic = Arithmetic(op, num_ranks, reproducible, half, half is not None and rounds_everywhere)
    return make_messages(arithmetic, arrays, bytes_per_pack, num_packs, sizes or Sizes())


def sent(arrays, op=SUM, **how):
    return plan_of(arrays, op, **how)[0]


def elements(messages):
    """The messages, each as (array, start, stop)."""
    return [[(piece.index, piece.start, piece.stop) for piece in message.pieces] for message in messages]


def counts(messages):
    return [message.count for message in messages]


# Sizes in bytes, limit, packs in bytes.
PACKS = [
    ([128, 32, 800, 4], 200, [[128, 32, 800], [4]]),
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


def test_packs_close_once_they_are_larger_than_the_limit():
    for sizes, bytes_per_pack, packs in PACKS:
        grouped = group_by_size(sizes, bytes_per_pack)
        assert [[sizes[index] for index in pack] for pack in grouped] == packs
        assert [index for pack in grouped for index in pack] == list(range(len(sizes)))


@pytest.mark.parametrize("sizes", [Sizes(1, 8), Sizes(16, 16), Sizes(40, 24), Sizes()])
def test_plan_sends_elements_once(sizes):
    values = specs(3, 0, (2, 5), (), 17, (0, 4), 1) + specs(9, (), 6, dtype=I64) + specs(5, dtype=BF16)
    for bytes_per_pack, num_packs in product((0, 1, 3, 4, 5, 64, 10**9), (0, 1, 2, 3, 8, 100)):
        seen = [np.zeros(spec.num_elements, int) for spec in values]
        for message in sent(values, num_packs=num_packs, sizes=sizes, bytes_per_pack=bytes_per_pack):
            assert message.count > 0
            assert message.nbytes == message.count * message.wire.itemsize
            for piece in message.pieces:
                assert values[piece.index].dtype == message.wire
                seen[piece.index][piece.start : piece.stop] += 1
        assert all((times == 1).all() for times in seen), (bytes_per_pack, num_packs)


SMALL, LARGE = Sizes(direct_bytes=40, pack_bytes=20), Sizes(direct_bytes=400, pack_bytes=1 << 20)
# Values, how they are sent, and the messages: last arrays first, as the last layers' gradients are ready first.
PLANS = [
    (specs(1, 2, 3), {"num_packs": 0}, [[(2, 0, 3)], [(1, 0, 2)], [(0, 0, 1)]]),
    (specs(1, 1, 1), {"bytes_per_pack": 4}, [[(2, 0, 1), (1, 0, 1)], [(0, 0, 1)]]),
    (specs(4, 5), {"num_packs": 2}, [[(1, 0, 4)], [(1, 4, 5), (0, 0, 4)]]),
    # bytes_per_pack wins over num_packs, and cuts no array
    (specs(9, 1), {"num_packs": 3, "bytes_per_pack": 1}, [[(1, 0, 1)], [(0, 0, 9)]]),
    # packs are cut where the pack buffer is full, but for those whose size the user has said
    (specs(7, 6), {"sizes": SMALL}, [[(1, 0, 5)], [(1, 5, 6), (0, 0, 4)], [(0, 4, 7)]]),
    (specs(7, 6), {"sizes": SMALL, "bytes_per_pack": 10**9}, [[(1, 0, 6), (0, 0, 7)]]),
    # small arrays of a GPU share a buffer across large ones, and those of the host go in the order that they are in
    (specs(3, 500, 4), {"sizes": LARGE}, [[(2, 0, 4)], [(1, 0, 500)], [(0, 0, 3)]]),
    ([Spec((size,), F32, True) for size in (3, 500, 4)], {"sizes": LARGE}, [[(1, 0, 500)], [(2, 0, 4), (0, 0, 3)]]),
    # integers of one width share a pack for their mean
    (specs(2, dtype=I8) + specs(3, dtype=np.dtype(np.uint16)), {"op": MEAN}, [[(1, 0, 3), (0, 0, 2)]]),
    (specs(0, (0, 5), (3, 0)), {}, []),
    ([], {"op": MEAN}, []),
]


def test_messages_are_those_of_the_table():
    for values, how, expected in PLANS:
        assert elements(sent(values, **how)) == expected, (values, how)


def test_arrays_of_one_dtype_travel_together():
    """Whatever the limit; TF concatenates unlike dtypes and fails."""
    values = specs(1) + specs(1, dtype=I64) + specs(1) + specs(1, dtype=I64)
    for bytes_per_pack, expected in ((0, 2), (1, 4), (10**9, 2)):
        messages, num_packs = plan_of(values, bytes_per_pack=bytes_per_pack)
        assert len(messages) == num_packs == expected
        assert {message.wire for message in messages} == {F32, I64}


def test_num_packs_cuts_the_concatenation():
    """Pieces of total // num_packs, the last with the remainder; 0 does not pack."""
    for shapes, num_packs, expected in (
        ([5, 5, 6], 3, [5, 5, 6]),
        ([17], 3, [5, 5, 7]),
        ([1, 1], 8, [2]),  # more packs than elements
        ([2], 2, [1, 1]),
        ([5, 5], 1, [10]),
        ([5, 7], 0, [7, 5]),
        ([0, 0], 4, []),
        ([], 4, []),
        ([4, 0, 4], 2, [4, 4]),
    ):
        assert counts(sent(specs(*shapes), num_packs=num_packs)) == expected


def test_large_arrays_are_not_copied_into_a_pack():
    assert [message.is_direct for message in sent(specs(1))] == [True], "an array alone"
    sizes = Sizes(direct_bytes=40, pack_bytes=400)
    messages = sent(specs(9, 10, 11, 2, 3), sizes=sizes)
    assert [(message.is_direct, message.count) for message in messages] == [
        (False, 5),
        (True, 11),
        (True, 10),
        (False, 9),
    ]


def test_means_of_integers_are_not_reduced_in_place():
    """Their results have another dtype than their sums; but for 64 bits, which a GPU would have to convert first."""
    for spec, direct in (
        (Spec((100,), I8, False), False),
        (Spec((100,), I64, False), True),
        (Spec((9,), I64, True), False),
    ):
        messages = sent([spec], MEAN, sizes=Sizes(8, 400))
        assert {message.is_direct for message in messages} == {direct}, spec


def test_one_rank_copies_nothing_into_packs():
    assert all(message.is_direct for message in sent(specs(1, 2, 3), num_ranks=1, sizes=Levels.solo()))


def test_reductions_keep_the_dtype_but_means_of_integers():
    names = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
    low = [np.dtype(getattr(ml_dtypes, name)) for name in names]
    means = dict.fromkeys("bBhH", ("i4", "f4")) | {"i": ("i8", "f8"), "I": ("u8", "f8")}
    means |= dict.fromkeys("lLqQ", ("f8", "f8"))
    for op, dtype in product(OPS, [*map(np.dtype, "bBhHiIlLqQefdgFDG"), *low]):
        if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
            with pytest.raises(InvalidArgumentError, match="order"):
                wire_and_result_dtypes(op, dtype)
        else:
            wire, result = means.get(dtype.char, (dtype, dtype)) if op is MEAN else (dtype, dtype)
            assert wire_and_result_dtypes(op, dtype) == (np.dtype(wire), np.dtype(result))
    assert {accumulator_dtype(dtype) for dtype in low} == {np.dtype(np.float32)}


# Their characters are those of dtypes of NumPy, or their kind is.
OF_OTHERS = [
    getattr(ml_dtypes, name) for name in ("int4", "uint4", "uint1", "float8_e8m0fnu") if name in dir(ml_dtypes)
]


@pytest.mark.parametrize("dtype", ["?", "U3", "S3", "O", "M8[s]", "m8[s]", "f4,i4", "V4", *OF_OTHERS])
def test_dtypes_without_numbers_are_refused(dtype):
    """Only the least and the greatest of booleans are booleans."""
    for op in OPS:
        if dtype == "?" and op in (ReduceOp.MIN, ReduceOp.MAX):
            assert wire_and_result_dtypes(op, np.dtype(dtype)) == (np.bool_, np.bool_)
            continue
        with pytest.raises(InvalidArgumentError, match=f"{op} needs numbers, got dtype"):
            wire_and_result_dtypes(op, np.dtype(dtype))


# Lists for a transport of fused arrays.


def is_fused(arrays, least_bytes=None, **how):
    """Tell if arrays are fused: on one node, or on several, where messages are worth it from some bytes on."""
    across = None if least_bytes is None else InterNode(None, least_bytes, True)
    reducer = FusedReducer(Slots(None, 1 << 20), 1, 0, Traffic(), across)
    options = {"reproducible": False, "half": None, "rounds_everywhere": False} | how
    return make_fused_lists(Arithmetic(SUM, 4, *options.values()), arrays, reducer) is not None


HALVES, INTEGERS = specs(3) + specs(3, dtype=BF16), specs(3, dtype=I64)


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        ([Spec((3,), F32, True), *specs(3)], {}, False),  # of a GPU
        # what every rank rounds, nor other arrays of such a call; without float32 there is nothing to round
        ([*INTEGERS, *specs(3)], {"half": BF16, "rounds_everywhere": True}, False),
        (INTEGERS, {"half": BF16, "rounds_everywhere": True}, True),
        # partial sums of halves that cross nodes in rank order would be rounded on the way
        (HALVES, {"reproducible": True, "least_bytes": 0}, False),
        (HALVES, {"reproducible": True}, True),
        (HALVES, {"least_bytes": 0}, True),
        (specs(3), {"reproducible": True, "least_bytes": 0}, True),
        # too few bytes for messages between nodes, of all lists
        (specs(3) + specs(1, dtype=I64), {"least_bytes": 20}, True),
        (specs(3) + specs(1, dtype=I64), {"least_bytes": 21}, False),
    ],
)
def test_lists_are_fused_where_that_is_right(values, how, expected):
    assert is_fused(values, **how) is expected
