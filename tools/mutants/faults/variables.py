"""Seeded faults of variables."""

from fault import Fault

TESTS = ["tests/variables"]
FAULTS = [
    Fault(
        "sync_on_read.py",
        "self._store(at, share + rest if at == 0 and has_first else share, None)",
        "self._store(at, share, None)",
        "the remainder of an ON_READ integer is lost when it is assigned",
    ),
    Fault(
        "sync_on_read.py",
        "for its in ((parts - rest) / count, rest)",
        "for its in (parts - rest, rest)",
        "a sum that is assigned to an ON_READ variable counts once a replica",
    ),
    Fault(
        "sync_on_read.py",
        "for at in range(len(self._copies)):\n            self._store(at, array, ufunc)",
        "for at in range(1):\n            self._store(at, array, ufunc)",
        "only the first copy of a rank is reset",
    ),
    Fault(
        "sync_on_read.py",
        "copies.append(arrays.copied_here(value))",
        "copies.append(value)",
        "the replicas of a rank share one ON_READ copy",
    ),
    Fault(
        "sync_on_read.py",
        'return ops.broadcast(self._value, "all", call=call)',
        "return self._value.copy()",
        "ONLY_FIRST_REPLICA reads this rank's copy",
    ),
    Fault(
        "mirrored.py",
        "return group is parts_of(self._strategy).group and (entry is None or entry.replica_context is None)",
        "return True",
        "a mirrored variable of another strategy counts as equal on all ranks",
    ),
    Fault(
        "mirrored.py",
        'value = ops.broadcast(given[0], "all", call=call, error=error)',
        "value = given[0]",
        "ONLY_FIRST_REPLICA assigns each replica's own value",
    ),
    Fault(
        "mirrored.py",
        "values = (values / self._strategy.num_replicas_in_sync).astype(self.dtype, copy=False)",
        "pass",
        "scatter_add with MEAN adds the sum",
    ),
    Fault(
        "mirrored.py",
        "if self._takes_first and context.replica_id_in_sync_group != 0:",
        "if False:",
        "scatter with ONLY_FIRST_REPLICA applies the rows of all replicas",
    ),
    Fault(
        "mirrored.py",
        "if self._aggregation is VariableAggregation.SUM and num_replicas > 1:",
        "if False:",
        "a number that is assigned with SUM is counted once a replica, in silence",
    ),
    Fault(
        "mirrored.py",
        "return array if array.shape == self.shape else np.broadcast_to(array, self.shape)",
        "return array",
        "a number assigned with an aggregation is not spread over the variable",
    ),
    Fault(
        "assigning.py",
        'return self._assign("assign_sub", delta, np.subtract, read_value)',
        'return self._assign("assign_sub", delta, np.add, read_value)',
        "assign_sub adds",
    ),
    Fault(
        "variable.py",
        "return self if read_value else None",
        "return self",
        "read_value=False is ignored",
    ),
    Fault(
        "variable.py",
        "if array.shape != own.shape and array.shape != ():",
        "if array.size != own.size and array.size != 1:",
        "arrays of other shapes are accepted",
    ),
    Fault(
        "variable.py",
        "if self._replicas is not None and isinstance(value, PerReplica) and not self._is_in_run():",
        "if False:",
        "a PerReplica is assigned in cross-replica context",
    ),
    Fault(
        "variable.py",
        "if entry is not None and entry.strategy is not self._strategy:",
        "if False:",
        "a variable of another strategy can be assigned",
    ),
    Fault(
        "casting.py",
        "if not low <= number <= high:",
        "if not low <= number <= high + 1:",
        "256 wraps around to 0 in uint8",
    ),
    Fault(
        "casting.py",
        'if drops_imaginary or not np.can_cast(given, wanted, "same_kind"):',
        "if drops_imaginary:",
        "a fraction is cut off in silence",
    ),
    Fault(
        "casting.py",
        'if dtype.kind in "iub":',
        'if dtype.kind in "ub":',
        "signed integers can have the aggregation MEAN",
    ),
    Fault(
        "sparse_updates.py",
        "ufunc.at(target, indices, values)",
        "target[indices] = ufunc(target[indices], values)",
        "of rows with the same index only one is added",
    ),
    Fault(
        "sparse_updates.py",
        "if not 0 <= index < len(target):",
        "if not -len(target) <= index < len(target):",
        "negative row numbers are accepted",
    ),
    Fault(
        "sparse_updates.py",
        'if call == "scatter_div" and target.dtype.kind in "iu":',
        "if False:",
        "scatter_div of whole numbers fails",
    ),
    Fault(
        "placement.py",
        "self._group.shared.write(array, arrays.on_host(value))",
        "pass",
        "a per-node variable begins with zeros",
    ),
    Fault(
        "placement.py",
        "is_own = not self.devices and arrays.is_device(value)",
        "is_own = True",
        "per-node variables are not shared",
    ),
    Fault(
        "array_protocol.py",
        'return part.copy() if getattr(part, "base", None) is not None else part',
        "return part",
        "an indexed part can be written, or changes with the variable",
    ),
    Fault(
        "array_protocol.py",
        "return _forward(lambda own, other: operate(other, own))",
        "return _forward(operate)",
        "1 - v computes v - 1",
    ),
    Fault(
        "array_protocol.py",
        'written = inputs[:1] if method == "at" else kwargs.get("out", ())',
        "written = ()",
        "numpy.add(v, 1, out=v) writes one rank's copy",
    ),
    Fault(
        "variable.py",
        'value = parts_of(strategy).cross_device_ops.broadcast(array, "all", call="initial value of a Variable")',
        "value = array.copy()",
        "ranks begin with initial values of their own",
    ),
    Fault(
        "variable.py",
        "return value.copy() if value is self._local_view or self._replicas is not None else value",
        "return value",
        "what read_value returned changes with the variable",
    ),
    Fault(
        "variable.py",
        "view.flags.writeable = False",
        "pass",
        "local_value can be written",
    ),
    Fault(
        "variable.py",
        "self._trainable = self._is_trainable_by_default if trainable is None else trainable",
        "self._trainable = True if trainable is None else trainable",
        "metrics are trainable",
    ),
]
