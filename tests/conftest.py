"""Hooks of the run at several numbers of ranks (see mpi_session), and fixtures for all tests."""

import os

from jobs.failing import job
from mpi_session.plugin import comm, pytest_addoption, pytest_configure, pytest_pycollect_makeitem
from support.placements import placement
from support.reductions import repeated
from support.replicas import replicas, strategy
from support.transports import pytest_generate_tests, transport, transport_of_case
from transport.failures.clocks import clock

os.environ.setdefault("MPIDIST_FLIGHT_DIR", "off")  # of the calls that fail on purpose, no files
os.environ.setdefault("MPIDIST_STRAGGLER", "0")  # a busy machine makes ranks slow, and a warning would stand in outputs

__all__ = [
    "clock", "comm", "job", "placement", "pytest_addoption", "pytest_configure", "pytest_generate_tests",
    "pytest_pycollect_makeitem", "repeated", "replicas", "strategy", "transport", "transport_of_case",
]  # fmt: skip
