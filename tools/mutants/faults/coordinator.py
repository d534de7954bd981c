"""Seeded faults of the coordinator."""

from fault import Fault

TESTS = ["tests/coordinator"]
FAULTS = [
    Fault(
        "worker.py",
        "            self.servers.flush()\n            return encode((True, value)",
        "            return encode((True, value)",
        "a function counts as done before its changes are made",
    ),
    Fault(
        "worker.py",
        "            self._require_rank(name)\n",
        "",
        "a forked process answers in the worker's name",
    ),
    Fault(
        "worker.py",
        "if isinstance(error, StopIteration):",
        "if False:",
        "the end of a worker's data ends a loop of the chief",
    ),
    Fault(
        "worker.py",
        "except (Exception, SystemExit) as error:",
        "except Exception as error:",
        "sys.exit in a function ends the worker",
    ),
    Fault(
        "worker.py",
        "outer, self.servers.function = self.servers.function, name",
        'outer, self.servers.function = self.servers.function, ""',
        "a barrier in a scheduled function waits for ever",
    ),
    Fault(
        "crew.py",
        "        if self._error is not None:\n            raise self._error\n        return self._value",
        "        return self._value",
        "fetch of a function that failed returns an object",
    ),
    Fault(
        "crew.py",
        "self.set(None, CancelledError(",
        "self.set(_NOTHING, CancelledError(",
        "a fetch waits for ever for a function that was cancelled",
    ),
    Fault(
        "cluster_coordinator.py",
        "if any(isinstance(leaf, RemoteValue) for leaf in nest.flatten(given)[0]):",
        "if False:",
        "a RemoteValue as an argument is not refused by name",
    ),
    Fault(
        "cluster_coordinator.py",
        "context = InputContext(max(1, len(ranks) - 1), max(0, number - 1), 1)",
        "context = InputContext(max(1, len(ranks) - 1), 0, 1)",
        "all workers make the data set of worker 0",
    ),
    Fault(
        "cluster_coordinator.py",
        "self._error = self._error or error",
        "pass",
        "a chief that works alone hides the error of a function",
    ),
    Fault(
        "cluster_coordinator.py",
        "error, self._error = self._error, None",
        "error = self._error",
        "join raises the same error again and again",
    ),
    Fault(
        "cluster_coordinator.py",
        '        if self._is_closed:\n            raise RuntimeError(f"{call} on a closed coordinator',
        '        if False:\n            raise RuntimeError(f"{call} on a closed coordinator',
        "schedule on a closed coordinator waits for ever",
    ),
    Fault(
        "crew.py",
        "call = self._calls[rank] = self._queue.popleft()",
        "call = self._calls[rank] = self._queue.pop()",
        "functions are called in another order",
    ),
    Fault(
        "crew.py",
        "self._queue = deque(sorted([lost, *self._queue], key=lambda call: call.number))",
        "pass",
        "the function of a lost worker is not called again",
    ),
    Fault(
        "crew.py",
        "if not self._queue or rank in self._calls or rank in self._left:",
        "if not self._queue or rank in self._left:",
        "a busy worker gets a second function, whose result is lost",
    ),
    Fault(
        "crew.py",
        '            self._fail(error, "another function had failed")',
        "            self._on_error(error)",
        "functions are called after one has failed",
    ),
    Fault(
        "crew.py",
        "oldest = min(one.number for one in self._calls.values())",
        "oldest = call.number",
        "servers forget which pushes of a call were made",
    ),
    Fault(
        "functions.py",
        "if known is not None and getattr",
        "if False and getattr",
        "two functions take one name in silence",
    ),
    Fault(
        "functions.py",
        "        return PerWorkerIterator(self.handle[0], self._num_iterators - 1)",
        "        return PerWorkerIterator(self.handle[0], 0)",
        "a second iterator of a data set goes on where the first one is",
    ),
    Fault(
        "functions.py",
        "            self._iterators[handle] = iter(self._made[number])",
        "            return iter(self._made[number])",
        "an iterator begins anew in each function",
    ),
    Fault(
        "functions.py",
        "takes_context = bool(inspect.signature(source).parameters)",
        "takes_context = False",
        "a function that takes an InputContext gets none",
    ),
    Fault(
        "worker.py",
        "header.variables, header.rows)",
        "header.variables, 0)",
        "servers never forget old calls",
    ),
    Fault(
        "worker.py",
        "(connection.rank,), math.inf)",
        "(connection.rank,), 1.0)",
        "a worker gives up an idle chief",
    ),
    Fault(
        "worker.py",
        "        if not self._has_left:\n            self._has_left = True",
        "        if True:\n            self._has_left = True",
        "a worker leaves twice",
    ),
]
