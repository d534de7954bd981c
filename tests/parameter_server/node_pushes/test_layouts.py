"""How pushes lie in memory, and how they are added there."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.parameter_server.messages import Change, Location, Push, RowsChange
from mpidist.parameter_server.node_pushes import Layout

pytestmark = pytest.mark.no_mpi

SHAPES = [((3, 4), "float32"), ((), "float64"), ((0, 5), "float32"), ((1001,), "float64"), ((2,), "int8"), ((), "int8")]
TABLES = [((10, 3), "int8"), ((6,), "float64"), ((7, 0), "float32")]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_pushes_of_any_arrays_and_rows_are_added(num_workers: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    picked = [SHAPES[at] for at in random.permutation(len(SHAPES))[: random.integers(0, 1 + len(SHAPES))]]
    arrays = [Location(0, key, shape, np.dtype(dtype), f"a{key}") for key, (shape, dtype) in enumerate(picked)]
    tables = [Location(0, 10 + key, shape, np.dtype(dtype), f"t{key}") for key, (shape, dtype) in enumerate(TABLES)]
    tables = tables[: random.integers(0, 4)]

    def values(location: Location, shape: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
        return random.integers(-5, 5, shape).astype(location.dtype)

    pushes = []
    for _ in range(num_workers):
        rows = []
        for table in tables:
            indices = random.integers(0, table.shape[0], random.integers(0, 4))
            rows.append(RowsChange(table, indices, values(table, (indices.size, *table.shape[1:]))))
        own = [values(location, location.shape) for location in arrays]
        pushes.append(Push(arrays, own, rows, Change.ADD, "assign_add"))
    layout = Layout(arrays, tables)
    parts = [np.zeros(layout.nbytes(push), np.uint8) for push in pushes]
    for push, part in zip(pushes, parts, strict=True):
        layout.write(push, part)
    for shard in reversed(range(num_workers)):
        layout.add(parts, shard, parts[0])
    for at, total in enumerate(layout.sums(parts[0])):
        np.testing.assert_array_equal(total, sum(push.values[at] for push in pushes))
        assert total.dtype == arrays[at].dtype
    for at, joined in enumerate(layout.join_rows(parts)):
        np.testing.assert_array_equal(joined.indices, np.concatenate([push.rows[at].indices for push in pushes]))
        np.testing.assert_array_equal(joined.values, np.concatenate([push.rows[at].values for push in pushes]))
