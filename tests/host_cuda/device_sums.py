"""What ranks add in device memory, and whether it is their sum: numbers that are exact in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.contributions import contribution, reduction_of

from host_cuda.gpus import down, up

__all__ = ["is_total", "mine"]

F4 = np.dtype(np.float32)


def mine(rank: int, count: int, dtype: Any = F4) -> Any:
    return up(contribution("sum", rank, count, dtype))


def is_total(array: Any, size: int, count: int, dtype: Any = F4) -> bool:
    return bool((down(array) == reduction_of("sum", size, count, dtype)).all())
