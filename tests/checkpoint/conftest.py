"""A folder for the files of a test, the same on all ranks."""

from pathlib import Path

import pytest
from support.ranks import Intracomm


@pytest.fixture
def folder(comm: Intracomm, tmp_path: Path) -> Path:
    return Path(comm.bcast(str(tmp_path)))
