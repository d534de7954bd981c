"""Workers and parameter servers on the ranks of a test."""

import functools
import inspect
import time
from contextlib import contextmanager

from mpidist import CommunicationOptions
from mpidist.context_stack import parts_of
from mpidist.experimental import ParameterServerStrategy, server_rules
from mpidist.parameter_server.cluster import Role

__all__ = ["PATIENT", "deadline_of", "meet", "num_workers", "on_workers", "set_deadline_of_meetings", "worker_test"]

PATIENT = CommunicationOptions(timeout_seconds=600)  # of strategies that a busy machine must not end
BY_TEST = ("num_ps", "on_worker_lost", "replicas", "staleness", "variable_partitioner")  # names of arguments
_ROLES = []  # of this rank, where it is a server


def num_workers(comm, num_ps=1):
    """Return how many workers the ranks are, where the last ones are servers."""
    return 1 if comm.size == 1 else comm.size - num_ps


def on_workers(comm, work, **arguments):
    """Let the workers of a strategy work and its servers serve, and return what each worker returned. Collective."""
    result = None
    with ParameterServerStrategy(comm=comm, **arguments) as strategy:
        is_ps = strategy.is_ps
        if is_ps:
            _ROLES[:] = [role_of(strategy)]
            strategy.serve()
        else:
            result = work(strategy)
    return [result for is_ps, result in comm.allgather((is_ps, result)) if not is_ps]


def worker_test(**arguments):
    """Make a test of what each worker does, while servers serve. Fixtures of `BY_TEST` go to the strategy, too."""

    def decorate(work):
        own = [name for name in inspect.signature(work).parameters if name != "strategy"]

        @functools.wraps(work)
        def test(comm, **fixtures):
            given = {name: value for name, value in {**fixtures, "comm": comm}.items() if name in own}
            more = {name: value for name, value in given.items() if name in BY_TEST}
            on_workers(comm, functools.partial(work, **given), **arguments, **more)

        names = dict.fromkeys(["comm", *own])
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return test

    return decorate


def role_of(strategy):
    role = parts_of(strategy).peers
    assert isinstance(role, Role)
    return role


@contextmanager
def deadline_of(strategy, seconds):
    """Give the waits of this rank another deadline: the strategy's holds for what all ranks do together, too."""
    role = role_of(strategy)
    assert role.group is not None
    usual = role.group.timeout_seconds
    assert usual == PATIENT.timeout_seconds
    role.group.timeout_seconds = seconds
    try:
        yield
    finally:
        role.group.timeout_seconds = usual


def set_deadline_of_meetings(strategy, variable, seconds):
    """Give workers another deadline for each other, on the server of a variable: all else that they ask has time."""
    strategy.push(variable, seconds, server_rules.Registered("tests: deadline of meetings"))
    strategy.flush()


@server_rules.register("tests: deadline of meetings")
def _set_deadline(value, gradient, memory):
    workers = vars(_ROLES[0].server)["workers"]
    workers._timeout = float(gradient)


def meet(ranks):
    """Wait for all ranks of a communicator, however long they take, and leave the cores to them. Collective."""
    request = ranks.Ibarrier()
    while not request.Test():
        time.sleep(0.01)
