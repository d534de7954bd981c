"""What a scheduled function may not do, and which error the chief gets."""

import json
import os
import sys

import numpy as np
import pytest
from parameter_server.clusters import on_workers

from mpidist import Variable
from mpidist.experimental.coordinator import ClusterCoordinator, register

CODE = 5  # the exit code of a process that an error has left, in these tests
HERE = {}  # what functions of this rank find


class ShapeError(ValueError):
    """An error of the program."""


class PairError(ShapeError):
    """An error that is made from other arguments than a text."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def make_variable():
    with HERE["strategy"].scope():
        Variable(0.0)


def fork():
    child = os.fork()
    if not child:
        return  # without os._exit: the child goes on as if it were the rank
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CODE
    raise ChildProcessError("the child has failed")


def fail(error):
    raise error


FAILED = r"'test: {name}' failed on rank .: "
# A call of all workers, which the others do not make.
ALL = FAILED + r".*{call} in 'test: {name}', which the chief has scheduled: "
SERVE = FAILED + r".*serve\(\) of a coordinator (on the chief|in 'test: serve', which the chief has scheduled)"
# Else the chief would let another worker call the function, which has made some of its changes.
EXIT = FAILED + "it called sys.exit.*; return from the function"
BARRIER, VARIABLE, CLOSE, SCHEDULE, END = (
    ALL.replace("{call}", call)
    for call in (r"barrier\(\)", "Variable", r"close\(\)", r"schedule\(\)", r"close\(\) of a coordinator")
)
# Name -> the function, and the error of the chief: of the nearest kind that can be made from a text, if the error's own
# cannot.
FUNCTIONS = {
    "barrier": (lambda: HERE["strategy"].barrier(), RuntimeError, BARRIER),
    "variable": (make_variable, RuntimeError, VARIABLE),
    "close": (lambda: HERE["strategy"].close(), RuntimeError, CLOSE),
    "with": (lambda: HERE["strategy"].__exit__(None, None, None), RuntimeError, CLOSE),
    "serve": (lambda: HERE["coordinator"].serve(), RuntimeError, SERVE),
    "schedule": (lambda: HERE["coordinator"].schedule("test: right"), RuntimeError, SCHEDULE),
    "end": (lambda: HERE["coordinator"].close(), RuntimeError, END),
    "exit": (lambda: sys.exit(), RuntimeError, EXIT),
    "exit with 3": (lambda: sys.exit(3), RuntimeError, EXIT),
    "exit with a text": (lambda: sys.exit("no data"), RuntimeError, EXIT),
    "fork": (fork, ChildProcessError, "the child has failed"),  # which sends no result
    "own error": (lambda: fail(ShapeError("3 columns")), ShapeError, FAILED + ".*3 columns"),
    "error of a pair": (lambda: fail(PairError(1, 2)), ShapeError, FAILED + ".*PairError: 1 and 2"),
    "of a library": (lambda: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError, FAILED + ".*Singular matrix"),
    "of a module": (lambda: json.loads("{"), ValueError, FAILED + ".*Expecting property name"),
    "local error": (lambda: fail(type("LocalError", (KeyError,), {})("k")), KeyError, FAILED + ".*LocalError: 'k'"),
}
for name, (function, *_) in FUNCTIONS.items():
    register(f"test: {name}")(function)


def schedule_and_expect(comm, name, kind, text):
    """Schedule a function that fails, and another one after it."""

    def work(strategy):
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
def right(number):
    HERE["variable"].assign_add(1.0)
    return number + 1


@pytest.mark.core
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_that_fails_is_an_error_of_the_chief_alone(comm, name):
    _, kind, text = FUNCTIONS[name]
    schedule_and_expect(comm, name, kind, text.replace("{name}", name))
