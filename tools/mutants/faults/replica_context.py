"""Seeded faults of code inside `run`."""

from fault import Fault

TESTS = ["tests/replica_context", "tests/test_replica_rng.py", "tests/test_contexts.py"]
FAULTS = [
    Fault(
        "joint_calls.py",
        "write([argument for argument, _ in of_replicas], error)",
        "write([of_replicas[0][0]] * len(of_replicas), error)",
        "what the other replicas of a rank assign is not counted",
    ),
    Fault(
        "joint_calls.py",
        "for what in (name for name in first if other[name] != first[name]):",
        "for what in ():",
        "replicas of a rank that pass different operations are not found",
    ),
    Fault(
        "joint_calls.py",
        "axes = [axis_of(axis, spec.shape) for spec in given]",
        "axes = [0 for spec in given]",
        "reduce_scatter of replicas ignores the axis",
    ),
    Fault(
        "joint_calls.py",
        "for at, own in enumerate(ids):",
        "for at, own in enumerate(range(len(ids))):",
        "every rank gets the first parts of a reduce_scatter",
    ),
    Fault(
        "joint_calls.py",
        "                        arrays.write(target, arrays.on_current_device(source))",
        "                        pass",
        "the outs of later replicas are not written",
    ),
    Fault(
        "joint_calls.py",
        "return self._share_new(_read_only(result))",
        "return self._share_new(result)",
        "a result that replicas share can be written",
    ),
    Fault(
        "joint_calls.py",
        "result = nest.map_structure(arrays.read_only_view, result)",
        "pass",
        "what merge_call returned can be written by one replica for all",
    ),
    Fault(
        "replica_context.py",
        "if not self._results:",
        "if True:",
        "a started all-reduce of replicas is waited for twice",
    ),
    Fault(
        "pending_writes.py",
        "written.require_equal(self._ids)",
        "pass",
        "replicas of a rank that assign different values are not found",
    ),
    Fault(
        "pending_writes.py",
        "if sum(copy is own for copy in self._copies.values()) != 1:",
        "if own is None:",
        "a replica's second write changes what another one sees",
    ),
    Fault(
        "pending_writes.py",
        "return shared if written is None else written.seen_by(replica_id)",
        "return shared",
        "a replica does not read what it has assigned",
    ),
    Fault(
        "pending_writes.py",
        "        self._on_commit()",
        "        pass",
        "copies on other GPUs are stale after a commit",
    ),
    Fault(
        "replica_context.py",
        "            self._replica_id,\n            *(whole_number",
        "            *(whole_number",
        "all replicas draw the same random numbers",
    ),
    Fault(
        "replica_context.py",
        '        if not context_stack.is_innermost(self):\n            self._require_default("all_reduce")',
        "        if False:\n            pass",
        "a context of another run is accepted",
    ),
    Fault(
        "solo_calls.py",
        'parts_of(self._strategy).agree("merge_call", {"function": name}, error)',
        "pass",
        "merge_call of different functions is not found",
    ),
    Fault(
        "replica_context.py",
        "            options = options_or_hints(options, experimental_hints)\n        return self.calls.all_reduce",
        "            pass\n        return self.calls.all_reduce",
        "experimental_hints of all_reduce are ignored",
    ),
    Fault(
        "joint_calls.py",
        "self._group.agreement.run += 1",
        "pass",
        "a call that a replica left out is taken for one of the next run",
    ),
    Fault(
        "joint_calls.py",
        "own_args = local_components(list(args), at, replicas.num_here) if args else ()",
        "own_args = local_components(list(args), 0, replicas.num_here) if args else ()",
        "all replicas of a rank get the batch of the first",
    ),
    Fault(
        "joint_calls.py",
        "if not self._in_use.acquire(blocking=False):",
        "if not self._in_use.acquire(blocking=False) and False:",
        "a run inside of merge_call takes the place of the run around it",
    ),
    Fault(
        "turns.py",
        "self._stack.gr_context = copy_context()",
        "pass",
        "context variables of the program are lost in run",
    ),
    Fault(
        "turns.py",
        "outcomes = self._make(first, arguments, _mismatch(replicas))",
        "outcomes = self._make(first, arguments, None)",
        "replicas of a rank that make different calls are not found",
    ),
    Fault(
        "turns.py",
        "                    replica.refuse(GreenletExit())\n                    self._resume(replica)",
        "                    pass",
        "a replica that is left behind is not ended: its finally is not run",
    ),
    Fault(
        "turns.py",
        "if replica.error is not None and not isinstance(replica.error, Exception):",
        "if False:",
        "KeyboardInterrupt in one replica waits for the others",
    ),
    Fault(
        "turns.py",
        "if self._num_refused > _MAX_REFUSED:",
        "if False:",
        "a replica that catches every error never ends",
    ),
    Fault(
        "turns.py",
        "for (replica, _), outcome in zip(waiting, outcomes, strict=True):",
        "for (replica, _), outcome in zip(waiting, outcomes[::-1], strict=True):",
        "replicas of a rank get each other's results",
    ),
]
