"""Public object of a coordinator: the chief schedules functions, and the workers call them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from mpidist import nest
from mpidist.context_stack import parts_of
from mpidist.coordinator.crew import Crew, RemoteValue
from mpidist.coordinator.functions import PerWorkerDataset, PerWorkerDatasets, handle_of, name_of
from mpidist.coordinator.worker import ADVICE, Caller, Work, result_of
from mpidist.datasets.input_options import InputContext
from mpidist.nest.encoding import encode
from mpidist.parameter_server.cluster import Role
from mpidist.strategy import Strategy
from mpidist.transport.text import count_text

__all__ = ["ClusterCoordinator"]

logger = logging.getLogger("mpidist.coordinator")


@final
class ClusterCoordinator:
    """The chief, worker 0, schedules functions, and the other workers call them.

    Making one is collective over the workers. Functions are registered on all of them::

        @mpidist.experimental.coordinator.register("step")
        def step(iterator):
            ...

        if strategy.is_ps:
            strategy.serve()
        else:
            coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
            dataset = coordinator.create_per_worker_dataset(make_dataset)
            if strategy.is_chief:
                iterator = iter(dataset)
                for _ in range(1000):
                    coordinator.schedule(step, args=(iterator,))
                coordinator.join()
            else:
                coordinator.serve()  # returns when the chief closes its strategy
        strategy.close()

    A chief that has no other worker calls the functions itself, as soon as they are scheduled. The chief has no thread:
    it gives functions to workers while it schedules, joins, asks `done()` or fetches.

    Where the others go on without a worker that was lost (`on_worker_lost="ignore"`), another worker calls its function
    again. What the function pushes is made once: of the first push of a call to a server, the second one, and so on,
    the server makes one each. So a function makes as many pushes each time, in the same order.

    For one strategy there is one coordinator: a second call returns the same object.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: If `strategy` is none.
        ValueError: If the strategy has no parameter servers, or bounds staleness.
        RuntimeError: On a parameter server.
        InvalidArgumentError: If another worker makes another call.
    """

    def __new__(cls, strategy: Strategy) -> ClusterCoordinator:
        """Return the coordinator of the strategy."""
        role = _role_of(strategy)
        if isinstance(role.coordinator, ClusterCoordinator):
            return role.coordinator
        made = super().__new__(cls)
        made._connect(strategy, role)
        role.coordinator = made
        return made

    def _connect(self, strategy: Strategy, role: Role) -> None:
        servers, group, ranks = role.servers, role.group, role.worker_ranks
        assert servers is not None
        servers.meet("ClusterCoordinator", {}, chief=True)
        self._strategy, self._is_chief = strategy, role.is_chief or group is None
        self._num_scheduled = 0
        self._is_closed = False
        self._error: Exception | None = None  # the first one of a function, which no call has raised yet
        self._crew: Crew | None = None
        self._work: Work | None = None
        number = 0 if group is None else ranks.index(group.topology.rank)
        context = InputContext(max(1, len(ranks) - 1), max(0, number - 1), 1)
        self._datasets = PerWorkerDatasets(context)
        self._caller = Caller(servers, self._datasets, f"rank {role.rank}")
        role.before_closing = self._end
        if group is None or len(ranks) == 1:
            return
        if self._is_chief:
            self._crew = Crew(group, ranks[1:], self._fail)
        else:
            self._work = Work(group, ranks[0], self._caller)

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any] | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedule a function on a worker. On the chief; returns at once.

        Args:
            fn: A function that all ranks have registered, or its name: see `register`.
            args: Its arguments: nests of arrays, numbers, texts, data sets of each worker and their iterators.
            kwargs: Its keyword arguments, likewise.

        Returns:
            What the function will return.

        Raises:
            TypeError: If the function is not registered, or an argument is of another kind.
            ValueError: If an argument is a `RemoteValue`.
            Exception: What an earlier function has raised; then the functions that waited are not called.
        """
        self._require_chief("schedule()")
        self._raise_error()
        name = name_of(fn)
        what = f"schedule({name!r})"
        if not isinstance(args, (list, tuple)):
            raise TypeError(f"{what}: args must be a list or tuple, got {type(args).__name__}")
        if not isinstance(kwargs, (type(None), Mapping)):
            raise TypeError(f"{what}: kwargs must be a dict, got {type(kwargs).__name__}")
        given = [tuple(args), dict(kwargs or {})]
        if any(isinstance(leaf, RemoteValue) for leaf in nest.flatten(given)[0]):
            raise ValueError(f"{what}: an argument is a RemoteValue, which no worker has; fetch it before")
        message = encode((name, encode(given, f"{what}: an argument", handle_of, ADVICE)), what)
        self._num_scheduled += 1
        call = RemoteValue(self._num_scheduled, name, message, self._crew)
        if self._crew is not None:
            self._crew.add(call)
            return call
        value, error = result_of(self._caller.call(message))
        call.set(value, error)
        if error is not None:
            self._fail(error)
        return call

    def join(self) -> None:
        """Wait until all functions that were scheduled have returned. On the chief.

        Raises:
            Exception: The first error of a function. The functions that waited then are not called. After that the
                coordinator can be used again.
            DeadlineExceededError: If no function ends within the strategy's `timeout_seconds`.
        """
        self._require_chief("join()")
        crew = self._crew
        if crew is not None:
            crew.wait("join()", lambda: crew.is_idle)
        self._raise_error()

    def done(self) -> bool:
        """Whether all functions that were scheduled have returned. On the chief; does not wait.

        Raises:
            Exception: What a function has raised.
            PeerFailedError: If a worker is lost, without which the others do not go on.
        """
        self._require_chief("done()")
        if self._crew is not None:
            self._crew.look("done()")
        self._raise_error()
        return self._crew is None or self._crew.is_idle

    def fetch(self, val: Any) -> Any:
        """Wait for the values of a nest, and return the nest with the results of the functions. On the chief.

        Results that have arrived can be fetched even after `close`.

        Args:
            val: A nest of `RemoteValue` objects and anything else.

        Raises:
            Exception: What a function has raised.
        """
        leaves, _ = nest.flatten(val)
        return nest.rebuild(val, [leaf.fetch() if isinstance(leaf, RemoteValue) else leaf for leaf in leaves])

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Create a data set for each worker. Called by all workers, in the same order. Local.

        Args:
            dataset_fn: A data set, or a function that returns one: called by each worker when a function first asks for
                the data set. It may take an `InputContext`, which counts the workers without the chief.

        Returns:
            What can be scheduled as an argument; a function gets its worker's data set. `iter(...)` of it likewise.

        Raises:
            TypeError: If it is neither. If the function returns something else, functions that ask for it raise this.
        """
        return self._datasets.add(dataset_fn)

    def serve(self) -> None:
        """Call functions until the chief has closed its strategy. On workers.

        Raises:
            RuntimeError: On the chief.
            PeerFailedError: If the chief is lost.
        """
        if self._work is None:
            raise RuntimeError(
                "serve() of a coordinator on the chief: it is for the other workers; the chief schedules"
            )
        self._work.serve()

    def close(self) -> None:
        """Call the functions that were scheduled, and let the other workers return from `serve`. On the chief.

        `strategy.close()` does so as well, but for functions that still wait, which are not called then.

        Raises:
            Exception: The first error of a function.
        """
        if self._is_closed:
            return
        self._caller.servers.require_no_function("close() of a coordinator")
        try:
            self.join()
        finally:
            if self._crew is None or not self._crew.is_broken:  # else `close` of the strategy ends this part
                if self._crew is not None:
                    self._crew.end()
                self._is_closed = True

    def _require_chief(self, call: str) -> None:
        parts_of(self._strategy).group.require_open(call)
        self._caller.servers.enter(call)
        self._caller.servers.require_no_function(call)
        if not self._is_chief:
            raise RuntimeError(f"{call} on a worker that is not the chief: the chief schedules, the others serve()")
        if self._is_closed:
            raise RuntimeError(f"{call} on a closed coordinator: the workers serve no longer")

    def _fail(self, error: Exception) -> None:
        """Keep an error of a function for the next call."""
        self._error = self._error or error

    def _raise_error(self) -> None:
        crew = self._crew
        if self._error is None:
            return
        if crew is not None:
            crew.wait("the end of the other functions", lambda: crew.is_idle)
        error, self._error = self._error, None
        raise error

    def _end(self, reason: str | None) -> Exception | None:
        """End this rank's part with the strategy's, and return the error of a function that no call has raised.

        `reason`: of an exception that the others do not have.
        """
        if self._work is not None:
            self._work.close(reason)
        crew = self._crew
        if self._is_closed:
            return None
        self._is_closed = True
        if crew is not None and (reason is not None or crew.is_broken):
            crew.leave(reason or "")
            return None
        num_dropped = 0 if crew is None else crew.end()
        if num_dropped:
            who = count_text(num_dropped, "scheduled function")
            logger.warning("mpidist: the strategy was closed before join(), so %s will never be called", who)
        error = self._error
        return error if error is None or error.__traceback__ is None else None  # `fetch` has raised it


def _role_of(strategy: Any) -> Role:
    if not isinstance(strategy, Strategy):
        raise TypeError(f"ClusterCoordinator takes a strategy, got {type(strategy).__name__}")
    role = parts_of(strategy).peers
    if not isinstance(role, Role):
        raise ValueError(
            f"ClusterCoordinator needs a ParameterServerStrategy, got {type(strategy).__name__}: its ranks all compute"
        )
    parts_of(strategy).group.require_open("ClusterCoordinator()")
    if role.servers is None:
        raise RuntimeError("ClusterCoordinator on a parameter server: it is for workers; a server calls serve()")
    if role.staleness is not None:
        raise ValueError(
            f"ClusterCoordinator needs staleness=None, got {role.staleness}: its functions run on any worker, and the "
            "chief makes no steps"
        )
    return role
