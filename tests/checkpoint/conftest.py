"""A folder for the files of a test, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@pytest.fixture
def folder(comm: Intracomm, tmp_path: Path) -> Path:
    return Path(comm.bcast(str(tmp_path)))
