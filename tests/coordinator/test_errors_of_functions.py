"""What a scheduled function may not do, and which error the chief gets."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parameter_server.clusters import on_workers

from mpidist import Variable
from mpidist.experimental import ParameterServerStrategy
from mpidist.experimental.coordinator import ClusterCoordinator, register

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CODE = 5  # the exit code of a process that an error has left, in these tests
HERE: dict[str, Any] = {}  # what functions of this rank find


class ShapeError(ValueError):
    """An error of the program."""


class PairError(ShapeError):
    """An error that is made from other arguments than a text."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def make_variable() -> None:
    with HERE["strategy"].scope():
        Variable(0.0)


def fork() -> None:
    child = os.fork()
    if not child:
        return  # without os._exit: the child goes on as if it were the rank
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CODE
    raise ChildProcessError("the child has failed")


def fail(error: Exception) -> None:
    raise error


FUNCTIONS = {
    "barrier": lambda: HERE["strategy"].barrier(),
    "variable": make_variable,
    "close": lambda: HERE["strategy"].close(),
    "with": lambda: HERE["strategy"].__exit__(None, None, None),
    "fork": fork,
    "serve": lambda: HERE["coordinator"].serve(),
    "exit": lambda: sys.exit(),
    "exit with 3": lambda: sys.exit(3),
    "exit with a text": lambda: sys.exit("no data"),
    "own error": lambda: fail(ShapeError("3 columns")),
    "error of a pair": lambda: fail(PairError(1, 2)),
    "error of a library": lambda: np.linalg.inv(np.zeros((2, 2))),
    "error of a module": lambda: json.loads("{"),
    "local error": lambda: fail(type("LocalError", (KeyError,), {})("k")),
}
for name, function in FUNCTIONS.items():
    register(f"test: {name}")(function)


def schedule_and_expect(comm: Intracomm, name: str, kind: type[Exception], text: str) -> None:
    """Schedule a function that fails, and another one after it."""

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variable = Variable(0.0)
        HERE.update(strategy=strategy, coordinator=ClusterCoordinator(strategy), variable=variable)
        if not strategy.is_chief:
            HERE["coordinator"].serve()
            return
        value = HERE["coordinator"].schedule(f"test: {name}")
        with pytest.raises(kind, match=text) as caught:
            HERE["coordinator"].join()
        assert type(caught.value) is kind
        with pytest.raises(kind):
            value.fetch()
        assert HERE["coordinator"].fetch(HERE["coordinator"].schedule("test: right", args=(2,))) == 3

    rank = os.getpid()
    try:
        on_workers(comm, work)
    except RuntimeError as error:
        if os.getpid() != rank:
            os._exit(CODE if "in a process that it has forked" in str(error) else 1)
        raise


@register("test: right")
def right(number: int) -> int:
    HERE["variable"].assign_add(1.0)
    return number + 1


FAILED = r"'test: {name}' failed on rank .: "
ALL = r".*{call} in 'test: {name}', which the chief has scheduled: "  # of all workers: the others do not make it
SERVE = r".*serve\(\) of a coordinator (on the chief|in 'test: serve', which the chief has scheduled)"
# Else the chief would let another worker call the function, which has made some of its changes.
EXIT = "it called sys.exit.*; return from the function"
# Name -> the error of the chief: of the nearest kind that can be made from a text, if the error's own cannot.
ERRORS: dict[str, tuple[type[Exception], str]] = {
    "barrier": (RuntimeError, FAILED + ALL.replace("{call}", r"barrier\(\)")),
    "variable": (RuntimeError, FAILED + ALL.replace("{call}", "Variable")),
    "close": (RuntimeError, FAILED + ALL.replace("{call}", r"close\(\)")),
    "with": (RuntimeError, FAILED + ALL.replace("{call}", r"close\(\)")),
    "serve": (RuntimeError, FAILED + SERVE),
    "exit": (RuntimeError, FAILED + EXIT),
    "exit with 3": (RuntimeError, FAILED + EXIT),
    "exit with a text": (RuntimeError, FAILED + EXIT),
    "fork": (ChildProcessError, "the child has failed"),  # which sends no result
    "own error": (ShapeError, FAILED + ".*3 columns"),
    "error of a pair": (ShapeError, FAILED + ".*PairError: 1 and 2"),
    "error of a library": (np.linalg.LinAlgError, FAILED + ".*Singular matrix"),
    "error of a module": (ValueError, FAILED + ".*Expecting property name"),
    "local error": (KeyError, FAILED + ".*LocalError: 'k'"),
}


@pytest.mark.core
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ERRORS)
def test_function_that_fails_is_an_error_of_the_chief_alone(comm: Intracomm, name: str) -> None:
    kind, text = ERRORS[name]
    schedule_and_expect(comm, name, kind, text.replace("{name}", name))
