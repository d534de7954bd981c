"""What a caller may ask for: reductions, and how they shall travel."""

import dataclasses
import math
import pickle
import warnings

import numpy as np
import pytest

from mpidist import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.experimental import CollectiveHints

pytestmark = pytest.mark.no_mpi


def fields(options):
    return options.bytes_per_pack, options.timeout_seconds, options.implementation.name, options.reproducible


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ValueError, {"bytes_per_pack": -1}),
        (TypeError, {"bytes_per_pack": None}),
        (TypeError, {"bytes_per_pack": 1.5}),
        (TypeError, {"bytes_per_pack": True}),
        (ValueError, {"timeout_seconds": -1e-9}),
        (ValueError, {"timeout_seconds": math.nan}),
        (TypeError, {"timeout_seconds": "1"}),
        (TypeError, {"timeout_seconds": True}),
        (TypeError, {"reproducible": "no"}),
        (TypeError, {"compress_everywhere": "no"}),
        (ValueError, {"implementation": "MPI"}),
        (ValueError, {"implementation": None}),
        (ValueError, {"implementation": 1}),
    ],
)
def test_values_without_meaning_are_refused(kind, wrong):
    """The error says what was got, or which argument it is about."""
    with pytest.raises(kind) as caught:
        CommunicationOptions(**wrong)
    ((name, value),) = wrong.items()
    assert name in str(caught.value) or repr(value) in str(caught.value)


def test_options_keep_their_arguments():
    """A timeout of 0 or None is no deadline."""
    assert fields(CommunicationOptions()) == (0, None, "AUTO", False)
    for timeout in (None, 0, 2.5, np.float32(1), np.int64(3), math.inf):
        assert CommunicationOptions(timeout_seconds=timeout).timeout_seconds == timeout
    for count in (0, np.int64(7), np.uint8(200), 2**40):
        options = CommunicationOptions(count)
        assert (options.bytes_per_pack, type(options.bytes_per_pack)) == (count, int)
    for name in ("ring", "RING", "Ring", CommunicationImplementation.RING):
        assert CommunicationOptions(implementation=name).implementation is CommunicationImplementation.RING
    with pytest.raises(TypeError):
        CommunicationOptions(0, None, "AUTO", True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bytes_per_pack = 1


def test_equal_options_are_equal_and_hash_alike():
    one, other = CommunicationOptions(5, 1, "ring"), CommunicationOptions(5, 1.0, "RING")
    assert one == other
    assert hash(one) == hash(other)
    assert one != CommunicationOptions(5, 1, "ring", reproducible=True)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("own", "other", "merged"),
    [
        ((5, None, "ring"), (0, 0, "auto"), (0, 0, "AUTO", False)),
        ((5, 3, "ring"), (0, None, "auto"), (0, 3, "AUTO", False)),
        ((5, 3, "ring"), (), (5, 3, "RING", False)),
        ((5, 3, "ring"), (7, 1, "nccl"), (7, 1, "NCCL", False)),
        ((0, None, "auto"), (7, 1, "ring"), (7, 1, "RING", False)),
        ((), (0, None, "auto"), (0, None, "AUTO", False)),
    ],
)
def test_options_of_a_call_that_are_given_win_also_defaults(own, other, merged):
    """A call can undo what the strategy asks for. `None` is no deadline given."""
    mine, theirs = CommunicationOptions(*own), CommunicationOptions(*other)
    assert fields(mine.merge(theirs)) == merged
    assert (mine, theirs) == (CommunicationOptions(*own), CommunicationOptions(*other))


@pytest.mark.parametrize("value", [False, True])
def test_options_of_a_call_win_in_fields_that_are_given_by_name(value):
    own = CommunicationOptions(reproducible=not value, compression="fp16", compress_everywhere=not value)
    other = CommunicationOptions(reproducible=value, compression="none", compress_everywhere=value)
    assert own.merge(other) == other
    assert own.merge(pickle.loads(pickle.dumps(other))) == other
    assert own.merge(CommunicationOptions()) == own.merge(None) == own


def test_hints_are_options_with_a_warning():
    """The warning points at the line that asked for hints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hints = CollectiveHints(50, 1)
    assert isinstance(hints, CommunicationOptions)
    assert fields(hints) == (50, 1, "AUTO", False)
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert "deprecated" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_collective_hints_take_two_arguments_alone():
    assert fields(CollectiveHints()) == (0, None, "AUTO", False)
    with pytest.raises(ValueError, match="bytes_per_pack"):
        CollectiveHints(-1)
    with pytest.raises(TypeError):
        CollectiveHints(0, None, "ring")


def test_reductions_are_named_in_any_case():
    for name in ("SUM", "MEAN", "MIN", "MAX", "PROD"):
        for text in (name, name.lower(), name.capitalize(), ReduceOp[name]):
            assert ReduceOp(text) is ReduceOp[name]
        assert str(ReduceOp[name]) == name
    for wrong in ("bogus", "", " sum", None, 0, 1.0, CommunicationImplementation.AUTO):
        with pytest.raises(ValueError, match=r"is not a valid ReduceOp.*SUM, MEAN, MIN, MAX, PROD"):
            ReduceOp(wrong)
