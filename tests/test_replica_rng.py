"""Random numbers of replicas: they follow from seed, key and replica alone."""

import hashlib

import numpy as np
import pytest

from mpidist import MultiWorkerMirroredStrategy, OneDeviceStrategy, get_replica_context

MASKS = {  # SHA-256 of dropout masks of 8 replicas, by step
    0: "fcfc34f299ba11cacfd3bdc25bb8040c4d9caf83b0cd3dcedaa85b5ea0689a31",
    1: "6174cf03d7c7ca07df435605c5e91df3f499ef9cc8d55e3da1e5a2b9f49d9689",
}


def masks(strategy, step):
    """Make a mask of 5 x 7 for each replica, and gather them in the order of replicas. Collective."""

    def mask():
        return get_replica_context().rng(7, step).random((1, 5, 7)) >= 0.1

    return strategy.gather(strategy.run(mask), axis=0)


def first(*arguments):
    """Give the first numbers of a generator of this rank's first replica."""
    return get_replica_context().rng(*arguments).integers(0, 1 << 62, 4).tolist()


@pytest.mark.core
@pytest.mark.ranks(1, 3)
def test_masks_of_replicas_are_the_same_on_any_number_of_ranks(comm):
    with MultiWorkerMirroredStrategy(replicas=8, comm=comm) as strategy:
        for step, digest in MASKS.items():
            everything = masks(strategy, step)
            assert np.array_equal(masks(strategy, step), everything)  # whatever was drawn before
            assert everything.shape == (8, 5, 7)
            assert hashlib.sha256(everything.astype(np.uint8).tobytes()).hexdigest() == digest
            assert len({mask.tobytes() for mask in everything}) == 8


@pytest.mark.ranks(3)
def test_ranks_that_are_replicas_have_the_same_numbers(comm):
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        as_ranks = masks(strategy, 3)
    with MultiWorkerMirroredStrategy(replicas=8, comm=comm) as strategy:
        assert np.array_equal(masks(strategy, 3)[: comm.size], as_ranks)


@pytest.mark.ranks(3)
def test_numbers_are_those_of_numpys_seed_sequence(comm, strategy):
    sequence = np.random.SeedSequence(7, spawn_key=(comm.rank, 5, 2))
    expected = np.random.Generator(np.random.Philox(sequence)).integers(0, 1 << 62, 4).tolist()
    assert strategy.run(first, (7, 5, 2)) == expected
    assert strategy.run(first, (np.int64(7), np.uint8(5), 2)) == expected


@pytest.mark.no_mpi
def test_replica_rng_depends_on_its_key_alone():
    with OneDeviceStrategy() as strategy:
        keys = [(7,), (8,), (7, 0), (7, 1), (7, 0, 0), (7, 0, 1), (2**64, 5), (0,), (0, 2**40)]
        numbers = [strategy.run(first, key) for key in keys]
        assert [strategy.run(first, key) for key in reversed(keys)] == numbers[::-1]
        assert len({tuple(drawn) for drawn in numbers}) == len(keys)
    assert first(7, 1) == numbers[3]  # the default strategy, outside of `run`


@pytest.mark.no_mpi
def test_wrong_seeds_and_keys_are_refused():
    for arguments, error, text in (
        ((1.5,), TypeError, "seed must be a whole number >= 0, got 1.5"),
        ((True,), TypeError, "seed must be a whole number >= 0, got True"),
        ((None,), TypeError, "seed must be a whole number >= 0, got None"),
        ((np.array([1, 2]),), TypeError, "seed must be a whole number >= 0"),
        ((-1,), ValueError, "seed must be a whole number >= 0, got -1"),
        ((7, 3, "layer"), TypeError, r"key\[1\] must be a whole number >= 0, got 'layer'"),
        ((7, np.True_), TypeError, r"key\[0\] must be a whole number >= 0, got"),
        ((7, (1, 2)), TypeError, r"key\[0\] must be a whole number >= 0, got \(1, 2\)"),
        ((7, np.int64(-2)), ValueError, r"key\[0\] must be a whole number >= 0, got -2"),
    ):
        with pytest.raises(error, match=rf"ReplicaContext\.rng: {text}"):
            get_replica_context().rng(*arguments)
