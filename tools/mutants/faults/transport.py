"""Seeded faults of moving and adding arrays."""

from fault import Fault

TESTS = ["tests/transport"]
FAULTS = [
    Fault(
        "reduction.py",
        "return np.dtype(np.float32) if is_low_precision(dtype) else dtype",
        "return dtype",
        "bfloat16 is added in bfloat16",
    ),
    Fault(
        "reduction.py",
        "without_float_errors(np.true_divide, out, divide_by, out=out)",
        "pass",
        "means that NumPy computes are sums",
    ),
    Fault(
        "reduction.py",
        "return overflowed if self.counts_overflow else 0",
        "return 0",
        "overflow in float16 is not counted",
    ),
    Fault(
        "reduction.py",
        "without_float_errors(ufunc, total, parts[-1], out=out)",
        "without_float_errors(ufunc, parts[-1], total, out=out)",
        "sums of NaN and order differ from the compiled ones",
    ),
    Fault(
        "tree.py",
        "return start + (1 << (stop - start - 1).bit_length() - 1)",
        "return (start + stop) // 2",
        "the order of a sum depends on the number of replicas otherwise",
    ),
    Fault(
        "tree.py",
        "start < other_stop and other_start < stop",
        "False",
        "rows that overlap are overwritten before they are read",
    ),
    Fault(
        "tree.py",
        "multiply(one.real, other.imag), multiply(one.imag, other.real)",
        "multiply(one.real, other.imag), multiply(one.real, other.imag)",
        "products of complex numbers in the tree are wrong",
    ),
    Fault(
        "topology.py",
        "return len(set(self.node_sizes)) == 1",
        "return True",
        "nodes of unequal size are taken for equal",
    ),
    Fault(
        "topology.py",
        "return self.local_rank == 0",
        "return self.rank == 0",
        "a node but the first has no leader",
    ),
    Fault(
        "settings.py",
        "if math.isnan(seconds) or seconds < 0:",
        "if False:",
        "a negative timeout is accepted",
    ),
    Fault(
        "settings.py",
        "    if text not in choices:\n",
        "    if False:\n",
        "a setting that is not understood is a KeyError",
    ),
    Fault(
        "settings.py",
        'if name.startswith("MPIDIST_") and name not in _KNOWN',
        "if False",
        "a misspelt variable is not told",
    ),
    Fault(
        "shared_memory/one_shot.py",
        "parts = self._parts[(slots.barrier.count + 1) % slots.num_slots]",
        "parts = self._parts[0]",
        "a fast rank overwrites what a slow one still reads",
    ),
    Fault(
        "shared_memory/schedule.py",
        "end = min(ends[piece], stop)",
        "end = ends[piece]",
        "a shard reaches into the next rank's",
    ),
    Fault(
        "shared_memory/inter_node.py",
        "across.traffic.overflowed += narrow(buffer, self._half)",
        "narrow(buffer, self._half)",
        "overflow between nodes is not counted",
    ),
    Fault(
        "shared_memory/inter_node.py",
        "self._outgoing = self._buffer.copy()",
        "self._outgoing = self._buffer",
        "the result comes into what is still being sent",
    ),
    Fault(
        "agreement/mpi_agreement.py",
        'fingerprint = fingerprint_of(("error", record.name, repr(error)))',
        "pass",
        "an error on one rank is not told to the others",
    ),
    Fault(
        "agreement/mpi_agreement.py",
        "posted, bit = posted ^ (self.run << 1), self.notice.bit",
        "posted, bit = posted, self.notice.bit",
        "calls of different runs are taken for one",
    ),
    Fault(
        "agreement/mpi_agreement.py",
        "if record.error is not None:  # the other ranks may be moving data already, so only a note reaches them\n            self.break_off(record.error)",
        "if record.error is not None:\n            pass",
        "without comparison an error on one rank leaves the others waiting",
    ),
    Fault(
        "agreement/mpi_agreement.py",
        "            mark_shared(error, self.ranks)  # each rank has a text of its own, of which one is printed\n",
        "",
        "an error of all ranks is printed by each",
    ),
    Fault(
        "agreement/mismatch_report.py",
        'names = ["call", "error"]',
        'names = ["call"]',
        "the report does not say which error a rank had",
    ),
    Fault(
        "agreement/mismatch_report.py",
        "        if len(groups) > 1:\n",
        "        if True:\n",
        "the report lists what is equal",
    ),
    Fault(
        "agreement/stop_notice.py",
        "self.stop_step = max(step for step, _ in gathered) + 1",
        "self.stop_step = min(step for step, _ in gathered) + 1",
        "ranks stop after different steps",
    ),
    Fault(
        "failures/exit_code.py",
        "return code & 0xFF if isinstance(code, int) else 1",
        "return code & 0xFF if isinstance(code, int) else 0",
        "sys.exit(text) counts as success",
    ),
    Fault(
        "failures/exit_code.py",
        'vars(error)[_WHERE] = "".join(traceback.format_stack(sys._getframe(1)))',
        "pass",
        "nobody says where sys.exit was called",
    ),
    Fault(
        "failures/status_board.py",
        "return tuple(rank for rank, process in processes if process.pid and process.state(self._process) == GONE)",
        "return ()",
        "a killed rank is not noticed",
    ),
    Fault(
        "failures/status_board.py",
        "return self.process not in (GONE, STOPPED)",
        "return self.process != GONE",
        "a stopped rank counts as able",
    ),
]
