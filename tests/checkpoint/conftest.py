"""A folder for the files of a test, the same on all ranks."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path)))
