"""Seeded faults of checkpoints."""

from fault import Fault

TESTS = ["tests/checkpoint"]
FAULTS = [
    Fault(
        "checkpoint.py",
        "return spread[0] if spread else context_stack.current_strategy()",
        "return context_stack.current_strategy()",
        "a checkpoint in another scope is of the wrong strategy",
    ),
    Fault(
        "checkpoint.py",
        'hasattr(type(self), name) or name.startswith("_")',
        'name.startswith("_")',
        "items may have the names of methods",
    ),
    Fault(
        "files.py",
        "if _checksum(array) != checksum:",
        "if False:",
        "a flipped bit in an array is restored",
    ),
    Fault(
        "files.py",
        'if zlib.crc32(text) != manifest["parts"].get(name):',
        "if False:",
        "a part of another checkpoint is restored",
    ),
    Fault(
        "files.py",
        "if found != _FORMAT:",
        "if False:",
        "a checkpoint of another version is read",
    ),
    Fault(
        "files.py",
        "    if place.exists():\n        remove(old)\n        place.rename(old)",
        "    if place.exists():\n        remove(place)",
        "a job that is killed while it replaces a checkpoint has none",
    ),
    Fault(
        "files.py",
        "if not place.exists() and _replaced(place).exists():",
        "if False:",
        "a checkpoint whose replacement was killed is not found",
    ),
    Fault(
        "files.py",
        "if folder not in but:",
        "if True:",
        "what is being written is removed as a leftover",
    ),
    Fault(
        "files.py",
        "others = sorted(one.name for one in place.iterdir() if not _FILES.fullmatch(one.name))",
        "others = []",
        "a folder of other files is replaced",
    ),
    Fault(
        "files.py",
        "return array if array.dtype == dtype else array.view(dtype).reshape(shape)",
        "return array",
        "bfloat16 comes back as bytes",
    ),
    Fault(
        "files.py",
        "file.chmod(folder.stat().st_mode & 0o666)",
        "pass",
        "colleagues cannot read a checkpoint",
    ),
    Fault(
        "leaves.py",
        "if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:\n            return states[0]",
        "if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:\n            return states[-1]",
        "the last replica's metric is restored",
    ),
    Fault(
        "leaves.py",
        "return total if aggregation is VariableAggregation.SUM else np.asarray(total / len(states), total.dtype)",
        "return total",
        "a MEAN over another number of replicas is a sum",
    ),
    Fault(
        "leaves.py",
        "return type(self._value)(state) if is_same_kind else state",
        "return state",
        "a number of NumPy comes back as one of Python",
    ),
    Fault(
        "leaves.py",
        "target[...] = state\n        return self._value",
        "return self._library.from_native(state, self._value)",
        "an array is replaced, and not written",
    ),
    Fault(
        "leaves.py",
        "return host.astype(_native(host.dtype), copy=False)",
        "return host",
        "arrays of the other byte order are restored wrongly",
    ),
    Fault(
        "manager.py",
        "return 1 if newest is None else newest + 1",
        "return 1 if newest is None else newest",
        "the next checkpoint replaces the newest",
    ),
    Fault(
        "manager.py",
        "for number in kept[: max(len(kept) + 1 - self._max_to_keep, 0)]:",
        "for number in kept[: max(len(kept) - self._max_to_keep, 0)]:",
        "one checkpoint too many is kept",
    ),
    Fault(
        "manager.py",
        "kept = [number for number in self._numbers(directory) if number != newest]",
        "kept = self._numbers(directory)",
        "the checkpoint that was just saved is removed",
    ),
    Fault(
        "manager.py",
        "                before = number\n",
        "                before = 0\n",
        "skip_broken finds no older checkpoint",
    ),
    Fault(
        "manager.py",
        "if writing.error is not None:\n                    raise writing.error",
        "if False:\n                    raise AssertionError",
        "an error of the background is lost",
    ),
    Fault(
        "preemption.py",
        "left - min(grace_seconds, _MOST_GRACE * max(left, 0.0))",
        "left",
        "the ranks do not leave before the end of the job",
    ),
    Fault(
        "preemption.py",
        "            self._handlers_before[number](number, frame)",
        "            pass",
        "the program's own handler is not called",
    ),
    Fault(
        "preemption.py",
        "leaving = SystemExit(self._exit_code)",
        "leaving = SystemExit(0)",
        "a preempted job looks finished",
    ),
    Fault(
        "restoring.py",
        "if form != leaf.form:",
        "if False:",
        "an array of another shape is restored",
    ),
    Fault(
        "restoring.py",
        "if not partial:",
        "if False:",
        "names that lack in the checkpoint are left in silence",
    ),
    Fault(
        "restoring.py",
        "elif owner is Owner.RANK and common.num_ranks != group.topology.size:",
        "elif False:",
        "what differed by rank is restored to other ranks",
    ),
    Fault(
        "restoring.py",
        "leaf.require_fitting(state)",
        "pass",
        "a position of other data is restored",
    ),
    Fault(
        "saving.py",
        "owners[name] = Owner.ALL if is_same else Owner.RANK",
        "owners[name] = Owner.ALL",
        "of what differs by rank, rank 0's is saved for all",
    ),
    Fault(
        "saving.py",
        "        np.copyto(memory, state)\n        return memory",
        "        return memory",
        "the second save in the background has the first one's numbers",
    ),
    Fault(
        "saving.py",
        "            _wait_for_parts(snapshot)\n",
        "",
        "rank 0 publishes in the background before the other ranks have written",
    ),
    Fault(
        "saving.py",
        "if item + path in leaves:",
        "if False:",
        "of two leaves with one name the first is lost",
    ),
]
