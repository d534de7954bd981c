"""Client of the parameter servers, for a worker, or for a rank that is worker and server in one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.parameter_server.messages.ends import GRACE_SECONDS, Channel, one_error
from mpidist.parameter_server.messages.protocol import Change, Header, Op, Step, from_json, to_json
from mpidist.parameter_server.rules import Rule
from mpidist.parameter_server.store import Store
from mpidist.parameter_server.transfers import change_rows
from mpidist.transport.arrays import bytes_of
from mpidist.transport.failures.open_groups import require_unused
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.group.thread_guard import ThreadGuard
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_errors import mark_left, mark_shared
from mpidist.transport.text import count_text, text_of

__all__ = ["LocalChannel", "Location", "ParameterClient", "Push", "RowsChange"]

logger = logging.getLogger("mpidist.parameter_server")

Array = np.ndarray[Any, Any]

_SUM: Final = Reduction("sum")
_MAX_LISTS: Final = 64  # that a server remembers of a worker


@final
@dataclass(frozen=True)
class Location:
    """Location of an array: its server, and its key, a number among all arrays of all servers."""

    server: int
    key: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str

    @cached_property
    def read_call(self) -> str:
        """Name of its reads, for messages."""
        return f"read of {self.name!r}"

    @cached_property
    def change_call(self) -> str:
        """Name of its changes, for messages."""
        return f"change of {self.name!r}"


@final
class RowsChange(NamedTuple):
    """Change of some rows of an array."""

    location: Location
    indices: Array  # [k] int64, the numbers of the rows, which exist
    values: Array  # [k, ...] contiguous, of the array's dtype

    @classmethod
    def none(cls, location: Location) -> RowsChange:
        """Change no row."""
        return cls(location, np.empty(0, np.int64), np.empty((0, *location.shape[1:]), location.dtype))

    @classmethod
    def joined(cls, changes: Sequence[RowsChange]) -> RowsChange:
        """Change what some changes of one array do, in their order. Copies."""
        arrays = ([change.indices for change in changes], [change.values for change in changes])
        return cls(changes[0].location, *map(np.concatenate, arrays))


@final
class Push(NamedTuple):
    """Changes that a worker pushes at once."""

    locations: Sequence[Location]  # of the arrays that are changed as a whole
    values: Sequence[Array]  # contiguous, of the same shapes and dtypes
    rows: Sequence[RowsChange]  # also what has no rows on this worker
    how: Any  # a `Change`, or a rule
    update: str  # the same for people, and for other workers

    def has_form_of(self, other: Push) -> bool:
        """Whether another push changes the same arrays, in the same way."""
        rows, others = ([change.location for change in push.rows] for push in (self, other))
        return self.update == other.update and list(self.locations) == list(other.locations) and rows == others

    @classmethod
    def sum_of(cls, pushes: Sequence[Push]) -> Push:
        """Add the pushes of a worker's replicas, to the same arrays, and join their rows, in their order."""
        first = pushes[0]
        if not all(push.has_form_of(first) for push in pushes):
            raise InvalidArgumentError("push(): the replicas of a worker differ in the variables, or in the update")
        sums = [np.empty_like(value) for value in first.values]
        for at, total in enumerate(sums):
            _SUM.combine([push.values[at].reshape(-1) for push in pushes], total.reshape(-1))
        rows = [RowsChange.joined(changes) for changes in zip(*(push.rows for push in pushes), strict=True)]
        return first._replace(values=sums, rows=rows)


@final
class LocalChannel:
    """A `Channel` of a rank that is worker and server in one: `start` carries out what concerns no other worker."""

    rank, number, broken = 0, 0, None

    def __init__(self) -> None:
        self._store = Store()
        self._lists: dict[int, list[int]] = {}
        self._values: list[Array] = []  # that were read last
        self._threads = ThreadGuard.of_group()

    def enter(self, call: str) -> None:
        """Check that this thread may make a call. Local."""
        if self._threads.here.token is not self._threads.admitted:
            self._threads.take_over(call)

    def start(
        self,
        call: str,
        op: int,
        variables: int = 0,
        data: Sequence[Array] = (),
        rows: int = 0,
        change: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Carry out a request, as of `Channel.start`."""
        self.enter(call)
        store = self._store
        if op == Op.ALLOCATE:
            store.allocate(variables, data[1])
        elif op == Op.NAME_LIST:
            self._lists[variables], self._values = data[0].tolist(), [np.full(data[0].size, -1)]
        elif op == Op.NAME_RULE:
            self.number = store.number_of_rule(from_json(data[0]))
        elif op == Op.CHANGE_ROWS:
            joined = np.concatenate([bytes_of(array) for array in data])
            for _ in change_rows(store, Header(op, 0, 0, rows, change, joined.size, numbers), joined):
                pass  # nobody else has a turn
        elif op in (Op.READ, Op.READ_ROWS, Op.CHANGE):
            found = [store.variables[key] for key in self._lists.get(variables, [variables])]
            if op == Op.CHANGE:
                errors: list[Exception] = []
                for stored, value in zip(found, data, strict=True):
                    try:
                        store.begin(stored, change)
                        store.change(stored, change, 0, value.reshape(-1).copy(), numbers)
                    except Exception as problem:  # of a rule: the other variables are changed
                        errors.append(problem)
                if errors:
                    raise errors[0]
            else:
                self._values = [stored.value[data[0]] if data else stored.value for stored in found]

    def make_room(self) -> None:
        """Do nothing: all requests are carried out."""

    def finish(self, more_seconds: float = 0.0, arrays: Sequence[Array] = (), places: tuple[int, ...] = ()) -> None:
        """Copy the values into arrays."""
        if not arrays:
            return
        values, self._values = self._values, []  # else they would keep memory
        for array, value in zip(arrays, values, strict=True):
            array[...] = value

    def leave(self, why: str) -> bool:
        """Do nothing: nobody waits for this worker."""
        return True

    def close(self) -> None:
        """Forget the variables."""
        self._store.variables.clear()


@final
class ParameterClient:
    """The requests of this worker to all servers. A change returns before the server has made it; reads see it.

    Args:
        group: The workers and servers; `None` on a rank that is worker and server in one.
        channels: The messages from and to each server; the first one lets workers meet.
        staleness: How many steps this worker may be ahead of the slowest one; `None` if servers count no steps.

    Attributes:
        function: The name of the function that this worker calls because the chief has scheduled it; "" for none.
    """

    def __init__(
        self, group: ServiceGroup | None, channels: Sequence[Channel | LocalChannel], staleness: int | None = None
    ) -> None:
        self.num_servers, self.function = len(channels), ""
        self._group, self._channels, self._staleness = group, list(channels), staleness
        self._goes_on, self._has_bound = group is not None and group.may_miss_ranks, staleness is not None
        self._grace = GRACE_SECONDS if self._has_bound else 0.0  # of reads, which wait for other workers then
        self._lists: list[dict[tuple[int, ...], tuple[int, tuple[int, ...]]]] = [{} for _ in channels]
        self._rules: list[dict[str, int]] = [{} for _ in channels]
        self._pushes: dict[int, int] | None = {}  # of each variable; `None` once a step was ended
        self._step_error = ""

    def enter(self, call: str) -> None:
        """Check that this thread may make a call. Local."""
        self._channels[0].enter(call)

    def require_no_function(self, call: str) -> None:
        """Raise if this worker makes a call of all, or of the chief, in a function that was scheduled. Local."""
        if self.function:
            raise RuntimeError(
                f"{call} in {self.function!r}, which the chief has scheduled: it is a call of all workers, or of "
                "the chief, which waits for the function; make the call outside of functions"
            )

    def begin_use(self, call: str) -> None:
        """Require that the servers serve no other strategy that this worker uses, and remember the use. Local."""
        if self._group is not None and not self._group.servers:
            servers = self._group.membership.in_world(channel.rank for channel in self._channels)
            require_unused(call, servers)
            self._group.servers = servers

    @property
    def broken(self) -> Exception | None:
        """Why a server takes no request any more, or `None`."""
        return next((channel.broken for channel in self._channels if channel.broken is not None), None)

    def allocate(self, location: Location, value: Array) -> None:
        """Put an array on its server."""
        channel = self._channels[location.server]
        about = to_json([list(location.shape), location.dtype.name])
        data = [about, np.ascontiguousarray(value)]
        channel.start(f"allocation of {location.name!r}", Op.ALLOCATE, location.key, data, rows=about.size)
        channel.finish()

    def read(self, locations: Sequence[Location], into: Sequence[Array] = ()) -> Sequence[Array]:
        """Read arrays, with one request to each server, `into` contiguous ones or new ones. Each is a snapshot."""
        arrays = into or [np.empty(location.shape, location.dtype) for location in locations]
        if len(locations) == 1:
            location, channel = locations[0], self._channels[locations[0].server]
            channel.make_room()
            channel.start(location.read_call, Op.READ, location.key)
            channel.finish(self._grace, arrays)
            return arrays
        parts = dict(sorted(_by_server(locations).items()))  # in one order on all workers: else they may deadlock
        lists = self._lists_of(locations, parts)
        self._make_room(parts)
        for server, places in parts.items():
            self._channels[server].start(_call_of("read", locations, places), Op.READ, lists[server][0])
        errors: list[Exception] = []
        for server, places in parts.items():
            try:
                self._channels[server].finish(self._grace, [arrays[place] for place in places], lists[server][1])
            except Exception as problem:  # the data of the other servers is under way, and must be received
                errors.append(problem)
        if errors:
            raise one_error(errors)
        return arrays

    def read_rows(self, location: Location, indices: Array) -> Array:
        """Read some rows of an array, a snapshot of them."""
        rows = np.empty((indices.size, *location.shape[1:]), location.dtype)
        call = f"read of rows of {location.name!r}"
        channel = self._channels[location.server]
        channel.make_room()
        channel.start(call, Op.READ_ROWS, location.key, [indices])
        channel.finish(self._grace, [rows])
        return rows

    def change(self, location: Location, value: Array, how: int | Rule) -> None:
        """Change an array by a contiguous one of the same shape and dtype."""
        if self._has_bound:
            self._count_pushes([location])
        change, numbers = self._code(location.server, how)
        channel = self._channels[location.server]
        channel.make_room()
        channel.start(location.change_call, Op.CHANGE, location.key, [value], change=change, numbers=numbers)

    def change_rows(self, changes: Sequence[RowsChange], how: int) -> None:
        """Change some rows of arrays, with one request to each server."""
        self.push(Push((), (), changes, how, ""))

    def push(self, push: Push) -> None:
        """Change several variables, with one request to each server, and one more for rows."""
        counts = isinstance(push.how, Rule)  # also a gradient without rows of an array, as those of some shards
        rows = [change for change in push.rows if counts or change.indices.size]
        if len(push.locations) == 1 and not rows:
            self.change(push.locations[0], push.values[0], push.how)
            return
        rows_locations = [change.location for change in rows]
        if self._has_bound:
            self._count_pushes([*push.locations, *rows_locations])
        parts, rows_parts = _by_server(push.locations), _by_server(rows_locations)
        codes = {server: self._code(server, push.how) for server in {**parts, **rows_parts}}
        lists = self._lists_of(push.locations, parts)
        self._make_room(codes)
        for server, places in parts.items():
            change, numbers = codes[server]
            data, call = [push.values[place] for place in places], _call_of("change", push.locations, places)
            self._channels[server].start(call, Op.CHANGE, lists[server][0], data, change=change, numbers=numbers)
        for server, places in rows_parts.items():
            some = [rows[place] for place in places]
            about = [[change.location.key for change in some], [change.indices.size for change in some]]
            data = [np.array(about, np.int64), *(array for change in some for array in change[1:])]
            call = f"change of rows of {some[0].location.name!r}" + (f" and {len(some) - 1} others" if some[1:] else "")
            change, numbers = codes[server]
            self._channels[server].start(call, Op.CHANGE_ROWS, 0, data, len(some), change, numbers)

    def meet(self, call: str, fields: Mapping[str, str], error: Exception | None = None, chief: bool = False) -> None:
        """Wait until all workers make the same call, with equal fields; with `chief`, worker 0 must be one of them.

        `error` is what is wrong on this worker; it is raised here, and on the others as an `InvalidArgumentError`.
        """
        self.require_no_function(call)
        if self._group is None:
            if error is not None:
                raise error
            return
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

    def missing_steps(self, call: str) -> Exception | None:
        """Return an error if `staleness` was given, and this worker never calls `step_done()`. Local."""
        return RuntimeError(f"{call}: {self._step_error}") if self._step_error else None

    def step_done(self) -> None:
        """Report the end of a step to the servers."""
        self._pushes, self._step_error = None, ""
        self._make_room(range(self.num_servers))
        for channel in self._channels:
            channel.start("step_done()", Op.STEP)

    def begin_call(self, number: int, oldest: int) -> None:
        """Assign the changes that follow to a call of a coordinator, which another worker may repeat.

        `number` 0 is no call; calls with lower numbers than `oldest` are not repeated.
        """
        if self._goes_on:  # else no worker makes a call again
            self._make_room(range(self.num_servers))
            for channel in self._channels:
                channel.start("the beginning of a call", Op.CALL, number, rows=oldest)

    def flush(self) -> None:
        """Wait until the servers have applied all changes of this worker."""
        error = self._first_failure()  # a change that fails on several servers is one error, not one of each call
        if error is not None:
            raise error

    def close(self, error: BaseException | None) -> Exception | None:
        """End this worker's part: wait until all workers end theirs, or leave because of an error: see `Peers`."""
        group = self._group
        if group is None:
            self._close_channels()
        if group is None or not group.is_open:
            return None
        is_own, lost = group.is_own(error), self.broken
        if is_own or lost is not None:
            self._leave(group, error if is_own else lost, is_own)
            return None
        try:
            self.flush()
            for server, channel in reversed([*enumerate(self._channels)]):
                channel.start("close()", Op.DONE, rows=server == 0)
            for channel in self._channels:
                channel.finish(math.inf)  # until all workers have ended their parts, which may take hours
        except BaseException as problem:  # a change that failed is told here, too: then no server waits for this worker
            self._leave(group, problem, is_own=True)
            raise
        self._close_channels()
        if all(channel.number for channel in self._channels):  # all workers have ended well
            group.free()
        else:
            group.abandon(has_ended=True)
        return self.missing_steps("close()") if error is None else None

    def _leave(self, group: ServiceGroup, error: BaseException | None, is_own: bool) -> None:
        """End this worker's part without the others."""
        text = "" if error is None else text_of(error)
        if is_own and not self._goes_on:
            group.tell_leaving(text)  # ends the wait of every rank
        else:
            told = [channel.leave(text) for channel in self._channels]
            if not all(told):  # a server that still lives would wait for this worker
                group.tell_leaving(text)
        self._close_channels()
        if error is not None and is_own and self._goes_on:
            mark_left(error)
        group.abandon()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def _first_failure(self) -> Exception | None:
        """Wait until all changes of this worker are made, or have failed. Returns the error of those that have."""
        errors = []
        for channel in self._channels:
            try:
                channel.finish()
            except Exception as error:  # of any kind: the other workers must learn of it
                errors.append(error)
        return one_error(errors) if errors else None

    def _make_room(self, servers: Iterable[int]) -> None:
        """Raise the errors that have arrived from some servers, before any request to these."""
        for server in servers:
            self._channels[server].make_room()

    def _tell_others(self, call: str, step: int) -> None:
        """Report a step to the servers where workers do not meet, and wait for their replies."""
        others = [other for other in self._channels[1:] if self._has_bound and other.broken is None]
        for other in others:
            other.start(call, Op.STEP, rows=step)
        for other in others:
            other.finish()

    def _count_pushes(self, locations: Iterable[Location]) -> None:
        """Warn once, when a variable was changed more often than `staleness` steps change it, and no step was ended."""
        if self._pushes is None or self._staleness is None or self._step_error:
            return
        for location in locations:
            pushes = self._pushes[location.key] = self._pushes.get(location.key, 0) + 1
            if pushes > self._staleness + 1 and not self._step_error and self._group is not None:
                often = count_text(self._staleness + 1, "time")
                self._step_error = (
                    f"rank {self._group.topology.rank} has changed variable {location.name!r} more than {often} and "
                    f"has never called step_done(), so staleness={self._staleness} bounds nothing; call "
                    "strategy.step_done() at the end of each step, or leave staleness out"
                )
                logger.warning("mpidist: %s", self._step_error)

    def _lists_of(
        self, locations: Sequence[Location], parts: Mapping[int, Sequence[int]]
    ) -> dict[int, tuple[int, tuple[int, ...]]]:
        return {
            server: self._list_of(server, tuple([locations[place].key for place in places]))
            for server, places in parts.items()
        }

    def _list_of(self, server: int, keys: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of a list on a server, and the places of its variables in the server's shared memory.

        Of one variable the number is its key, and the server's replies contain its place.
        """
        if len(keys) == 1:
            return keys[0], ()
        lists = self._lists[server]
        known = lists.get(keys)
        if known is None:
            channel, places = self._channels[server], np.empty(len(keys), np.int64)
            channel.finish()  # raises the error of an earlier change before a number is taken
            number = -1 - len(lists)
            if len(lists) >= _MAX_LISTS:
                number, _ = lists.pop(next(iter(lists)))
            channel.start("numbering of variables", Op.NAME_LIST, number, [np.array(keys, np.int64)])
            channel.finish(arrays=[places])
            known = lists[keys] = number, tuple(places.tolist())
        return known

    def _code(self, server: int, how: int | Rule) -> tuple[int, tuple[float, ...]]:
        if not isinstance(how, Rule):
            return how, ()
        number = self._rules[server].get(how.name)
        if number is None:
            channel = self._channels[server]
            channel.start(f"rule {how.name!r}", Op.NAME_RULE, data=[to_json(how.name)])
            channel.finish()
            number = self._rules[server][how.name] = channel.number
        return Change.RULE + 8 * number + len(how.numbers), how.numbers


def _call_of(verb: str, locations: Sequence[Location], places: Sequence[int]) -> str:
    """Name a request of some of the locations, for people."""
    return f"{verb} of {locations[places[0]].name!r}" if len(places) == 1 else f"{verb} of {len(places)} variables"


def _by_server(locations: Sequence[Location]) -> dict[int, list[int]]:
    """Return the places in a list of locations, by server."""
    parts: dict[int, list[int]] = {}
    for place, location in enumerate(locations):
        parts.setdefault(location.server, []).append(place)
    return parts
