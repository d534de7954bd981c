"""The servers, as a worker uses them: over messages, or in this process where one rank is worker and server in one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.parameter_server.messages.channel import GRACE_SECONDS, Channel
from mpidist.parameter_server.messages.known_lists import KnownLists
from mpidist.parameter_server.messages.locations import Location, RowsChange, by_server
from mpidist.parameter_server.messages.protocol import Change, Op, Step, to_json
from mpidist.parameter_server.messages.push import Push
from mpidist.parameter_server.rules import Rule
from mpidist.parameter_server.servers_in_use import begin_use
from mpidist.parameter_server.step_check import StepCheck
from mpidist.parameter_server.store import Store
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.shared_errors import mark_left, mark_shared
from mpidist.transport.text import text_of

__all__ = ["LocalServers", "RemoteServers", "Servers"]

Array = np.ndarray[Any, Any]


class Servers(ABC):
    """What a worker asks of the servers. A change returns before the server has made it; reads see it.

    Attributes:
        num_servers: How many they are.
        function: The name of the function that this worker calls because the chief has scheduled it; "" for none.
    """

    num_servers: int
    function = ""

    def require_no_function(self, call: str) -> None:
        """Raise if this worker makes a call of all workers in a function that the chief has scheduled. Local."""
        if self.function:
            raise RuntimeError(
                f"{call} in {self.function!r}, which the chief has scheduled: it is a call of all workers, and "
                "the chief waits for the function; make the call outside of functions"
            )

    @abstractmethod
    def begin_use(self, call: str) -> None:
        """Require that the servers serve no other strategy that this worker uses. Local.

        Raises:
            RuntimeError: If they do.
        """

    @property
    def broken(self) -> Exception | None:
        """Why a server cannot be asked any more, or `None`."""
        return None

    @abstractmethod
    def allocate(self, location: Location, value: Array) -> None:
        """Put an array on its server."""

    @abstractmethod
    def read(self, locations: Sequence[Location], into: Sequence[Array] = ()) -> Sequence[Array]:
        """Read arrays, with one request to each server. Each result is a snapshot.

        Args:
            locations: The arrays.
            into: Contiguous arrays that take the values; none for new ones.
        """

    @abstractmethod
    def read_rows(self, location: Location, indices: Array) -> Array:
        """Read some rows of an array, a snapshot of them."""

    @abstractmethod
    def change(self, locations: Sequence[Location], values: Sequence[Array], how: int | Rule) -> None:
        """Change arrays by contiguous arrays of the same shapes, with one request to each server."""

    @abstractmethod
    def change_rows(self, changes: Sequence[RowsChange], how: int | Rule) -> None:
        """Change some rows of arrays, with one request to each server."""

    def missing_steps(self, call: str) -> Exception | None:
        """Return an error if `staleness` was given, and this worker never says where its steps end. Local."""
        return None

    def push(self, push: Push) -> None:
        """Change several variables, with one request to each server, and one more for rows."""
        if push.locations:
            self.change(push.locations, push.values, push.how)
        rows = [change for change in push.rows if change.indices.size]
        if rows:
            self.change_rows(rows, push.how)

    @abstractmethod
    def meet(self, call: str, fields: Mapping[str, str], error: Exception | None = None, chief: bool = False) -> None:
        """Wait until all workers make the same call, and compare what they pass.

        Args:
            call: The name of the call.
            fields: What must be equal on all workers.
            error: What is wrong on this worker; raised here, and told to the others.
            chief: Whether the call needs the chief.

        Raises:
            InvalidArgumentError: If workers differ, or one has an error. On every worker.
            DeadlineExceededError: If not all workers come in time. On those that came.
        """

    @abstractmethod
    def step_done(self) -> None:
        """Tell the servers that this worker has done a step."""

    @abstractmethod
    def begin_call(self, number: int, oldest: int) -> None:
        """Say that the changes that follow belong to a call of a coordinator's, which another worker may make again.

        Args:
            number: The number of the call; 0 for none.
            oldest: Calls with lower numbers will not be made again.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until all changes of this worker are made."""

    @abstractmethod
    def close(self, error: BaseException | None) -> Exception | None:
        """End this worker's part: wait until all workers end theirs, or leave because of an error: see `Service`."""


@final
class LocalServers(Servers):
    """The one server of a rank that is alone."""

    num_servers = 1

    def __init__(self) -> None:
        self._store = Store()

    def begin_use(self, call: str) -> None:
        pass  # nobody else's server

    def allocate(self, location: Location, value: Array) -> None:
        self._store.allocate(location.key, value)

    def read(self, locations: Sequence[Location], into: Sequence[Array] = ()) -> Sequence[Array]:
        arrays = into or [location.empty() for location in locations]
        for location, array in zip(locations, arrays, strict=True):
            array[...] = self._store.variables[location.key].value
        return arrays

    def read_rows(self, location: Location, indices: Array) -> Array:
        rows: Array = self._store.variables[location.key].value[indices]
        return rows

    def change(self, locations: Sequence[Location], values: Sequence[Array], how: int | Rule) -> None:
        change, numbers = self._code(how)
        for location, value in zip(locations, values, strict=True):
            stored = self._store.variables[location.key]
            self._store.begin(stored, change)
            self._store.change(stored, change, 0, value.reshape(-1).copy(), numbers)

    def change_rows(self, changes: Sequence[RowsChange], how: int | Rule) -> None:
        change, numbers = self._code(how)
        for location, indices, values in changes:
            stored = self._store.variables[location.key]
            self._store.begin(stored, change)
            self._store.change_rows(stored, change, indices, values, numbers)

    def meet(self, call: str, fields: Mapping[str, str], error: Exception | None = None, chief: bool = False) -> None:
        self.require_no_function(call)
        if error is not None:
            raise error

    def step_done(self) -> None:
        pass  # no other worker is ahead or behind

    def begin_call(self, number: int, oldest: int) -> None:
        pass  # nobody makes a call again

    def flush(self) -> None:
        pass  # a change is made at once

    def close(self, error: BaseException | None) -> Exception | None:
        self._store.variables.clear()
        return None

    def _code(self, how: int | Rule) -> tuple[int, tuple[float, ...]]:
        if not isinstance(how, Rule):
            return how, ()
        return _code_of_rule(self._store.number_of_rule(how.name), how), how.numbers


@final
class RemoteServers(Servers):
    """The servers of other ranks.

    Args:
        group: The workers and servers.
        channels: The messages from and to each server; the first one lets workers meet.
        staleness: How many steps this worker may be ahead of the slowest one; `None` if servers count no steps.
    """

    def __init__(self, group: ServiceGroup, channels: Sequence[Channel], staleness: int | None) -> None:
        self.num_servers = len(channels)
        self._group, self._channels = group, list(channels)
        self._goes_on, self._has_bound = group.may_miss_ranks, staleness is not None
        self._steps = StepCheck(staleness, group.topology.rank)
        self._grace = GRACE_SECONDS if self._has_bound else 0.0  # of reads, which wait for other workers then
        self._lists = KnownLists(self._channels)
        self._rules: list[dict[str, int]] = [{} for _ in channels]

    def begin_use(self, call: str) -> None:
        begin_use(call, self._group, [channel.rank for channel in self._channels])

    def allocate(self, location: Location, value: Array) -> None:
        channel = self._channels[location.server]
        about = to_json([list(location.shape), location.dtype.name])
        data = [about, np.ascontiguousarray(value)]
        channel.start(f"allocation of {location.name!r}", Op.ALLOCATE, location.key, data, rows=about.size)
        channel.finish()

    def read(self, locations: Sequence[Location], into: Sequence[Array] = ()) -> Sequence[Array]:
        arrays = into or [location.empty() for location in locations]
        if len(locations) == 1:
            location = locations[0]
            self._channels[location.server].start(location.read_call, Op.READ, location.key)
            self._finish_read(location.server, arrays)
            return arrays
        parts = by_server(locations)
        lists = self._lists.of(locations, parts)
        for server, places in parts.items():
            self._channels[server].start(f"read of {len(places)} variables", Op.READ, lists[server].number)
        error: Exception | None = None
        for server, places in parts.items():
            try:
                self._finish_read(server, [arrays[place] for place in places], lists[server].places)
            except Exception as problem:  # the data of the other servers is under way, and must be received
                error = error or problem
        if error is not None:
            raise error
        return arrays

    def read_rows(self, location: Location, indices: Array) -> Array:
        rows = np.empty((indices.size, *location.shape[1:]), location.dtype)
        call = f"read of rows of {location.name!r}"
        channel = self._channels[location.server]
        channel.start(call, Op.READ_ROWS, location.key, [indices])
        channel.finish(self._grace)
        channel.data([rows])
        return rows

    def change(self, locations: Sequence[Location], values: Sequence[Array], how: int | Rule) -> None:
        if self._has_bound:
            self._steps.count(locations)
        if len(locations) == 1:
            location = locations[0]
            change, numbers = self._code(location.server, how)
            call = location.change_call
            self._channels[location.server].start(call, Op.CHANGE, location.key, values, change=change, numbers=numbers)
            return
        parts = by_server(locations)
        lists = self._lists.of(locations, parts)
        for server, places in parts.items():
            change, numbers = self._code(server, how)
            data, call = [values[place] for place in places], f"change of {len(places)} variables"
            self._channels[server].start(call, Op.CHANGE, lists[server].number, data, change=change, numbers=numbers)

    def change_rows(self, changes: Sequence[RowsChange], how: int | Rule) -> None:
        if self._has_bound:
            self._steps.count(change.location for change in changes)
        parts = by_server([change.location for change in changes])
        for server in parts:
            self._channels[server].finish()  # errors come before anything is sent
        for server, places in parts.items():
            some = [changes[place] for place in places]
            about = [[change.location.key for change in some], [change.indices.size for change in some]]
            data = [np.array(about, np.int64), *(array for change in some for array in change[1:])]
            call = f"change of rows of {some[0].location.name!r}" + (f" and {len(some) - 1} others" if some[1:] else "")
            number, numbers = self._code(server, how)
            self._channels[server].start(call, Op.CHANGE_ROWS, 0, data, len(some), number, numbers)

    def meet(self, call: str, fields: Mapping[str, str], error: Exception | None = None, chief: bool = False) -> None:
        self.require_no_function(call)
        self.begin_use(call)
        failure = self._first_failure()
        error = failure if error is None else error
        told = {"call": call, "error": text_of(error)} if error is not None else {"call": call, **fields}
        channel, how_it_ends = self._channels[0], Step.GOES_ON
        try:
            self._tell_others(call, Step.WAITS)
            channel.start(call, Op.MEET, data=[to_json(told)], rows=chief)
            channel.finish(GRACE_SECONDS)
            how_it_ends = Step.ALL_GO_ON
        except InvalidArgumentError as refusal:
            how_it_ends = Step.ALL_GO_ON
            mark_shared(refusal if error is None else error, self._group.ranks)
            raise refusal if error is None else error from None
        finally:
            self._tell_others(call, how_it_ends)

    def _first_failure(self) -> Exception | None:
        """Wait until all changes of this worker are made, or have failed. Returns the first error."""
        first = None
        for channel in self._channels:
            try:
                channel.finish()
            except Exception as error:  # of any kind: the other workers must learn of it
                first = first or error
        return first

    def _tell_others(self, call: str, step: int) -> None:
        """Tell the servers where workers do not meet, and wait until they know it."""
        others = [other for other in self._channels[1:] if self._has_bound and other.broken is None]
        for other in others:
            other.start(call, Op.STEP, rows=step)
        for other in others:
            other.finish()

    def missing_steps(self, call: str) -> Exception | None:
        return self._steps.error(call)

    def step_done(self) -> None:
        self._steps.end_step()
        for channel in self._channels:
            channel.start("step_done()", Op.STEP)

    def begin_call(self, number: int, oldest: int) -> None:
        if self._goes_on:  # else no worker makes a call again
            for channel in self._channels:
                channel.start("the beginning of a call", Op.CALL, number, rows=oldest)

    def flush(self) -> None:
        error = self._first_failure()  # a change that fails on several servers is one error, not one of each call
        if error is not None:
            raise error

    @property
    def broken(self) -> Exception | None:
        return next((channel.broken for channel in self._channels if channel.broken is not None), None)

    def close(self, error: BaseException | None) -> Exception | None:
        if not self._group.is_open:
            return None
        is_own, lost = self._group.is_own(error), self.broken
        if is_own or lost is not None:
            self._leave(error if is_own else lost, is_own)
            return None
        try:
            self.flush()
            for server, channel in reversed([*enumerate(self._channels)]):
                channel.start("close()", Op.DONE, rows=server == 0)
            for channel in self._channels:
                channel.finish(math.inf)  # until all workers have ended their parts, which may take hours
        except BaseException as problem:  # a change that failed is told here, too: then no server waits for this worker
            self._leave(problem, is_own=True)
            raise
        self._close_channels()
        if all(channel.number for channel in self._channels):  # all workers have ended well
            self._group.free()
        else:
            self._group.abandon(has_ended=True)
        return self.missing_steps("close()") if error is None else None

    def _leave(self, error: BaseException | None, is_own: bool) -> None:
        """End this worker's part without the others."""
        text = "" if error is None else text_of(error)
        if is_own and not self._goes_on:
            self._group.tell_leaving(text)  # ends the wait of every rank
        else:
            told = [channel.leave(text) for channel in self._channels]
            if not all(told):  # a server that still lives would wait for this worker
                self._group.tell_leaving(text)
        self._close_channels()
        if error is not None and is_own and self._goes_on:
            mark_left(error)
        self._group.abandon()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def _finish_read(self, server: int, arrays: Sequence[Array], places: tuple[int, ...] = ()) -> None:
        """Wait for what was read. `places`: those of a list; of one variable, the answer tells."""
        channel = self._channels[server]
        channel.finish(self._grace)
        channel.data(arrays, places or (channel.number,))

    def _code(self, server: int, how: int | Rule) -> tuple[int, tuple[float, ...]]:
        if not isinstance(how, Rule):
            return how, ()
        number = self._rules[server].get(how.name)
        if number is None:
            channel = self._channels[server]
            channel.start(f"rule {how.name!r}", Op.NAME_RULE, data=[to_json(how.name)])
            channel.finish()
            number = self._rules[server][how.name] = channel.number
        return _code_of_rule(number, how), how.numbers


def _code_of_rule(number: int, rule: Rule) -> int:
    return Change.RULE + 8 * number + len(rule.numbers)
