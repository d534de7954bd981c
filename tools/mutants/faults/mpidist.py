"""Seeded faults of the modules that lie in no folder of mpidist."""

from fault import Fault

TESTS = [
    "tests/test_equal_values.py",
    "tests/test_step_exits.py",
    "tests/test_cluster_tasks.py",
    "tests/test_contexts.py",
    "tests/strategies/test_refused_strategies.py",
    "tests/variables",
]
FAULTS = [
    Fault(
        "checksums.py",
        "zlib.crc32(data[data.size // _BLOCK_BYTES * _BLOCK_BYTES :].data, zlib",
        "zlib.crc32(data[:0].data, zlib",
        "the last bytes of an array are not compared",
    ),
    Fault(
        "checksums.py",
        "for name, of_ranks in gathered.items() if len(set(of_ranks)) > 1}",
        "for name, of_ranks in gathered.items()}",
        "values that are equal are told as different",
    ),
    Fault(
        "checksums.py",
        "leaf.values[: 1 if is_one else None]",
        "leaf.values[:1]",
        "of the replicas of a rank only the first is compared",
    ),
    Fault(
        "checksums.py",
        'array.astype(array.dtype.newbyteorder("="), copy=False)',
        "array",
        "equal numbers of another byte order differ",
    ),
    Fault(
        "checksums.py",
        "if self._num_runs % self._period:",
        "if True:",
        "MPIDIST_CHECK_VALUES compares nothing",
    ),
    Fault(
        "cluster_tasks.py",
        "if without or resolver is None:",
        "if resolver is None:",
        "TF_CONFIG on some ranks alone is accepted",
    ),
    Fault(
        "cluster_tasks.py",
        "resolver.check(len(workers), workers.index(topology.rank), hostnames)",
        "pass",
        "a resolver that contradicts MPI is accepted",
    ),
    Fault(
        "cluster_tasks.py",
        "TFConfigClusterResolver.of_job(comm) if given is None else given",
        "TFConfigClusterResolver.of_job(comm)",
        "the resolver that was given is not that of the strategy",
    ),
    Fault(
        "strategy_parts.py",
        "self.group.record_step_exit(self._num_runs, error)",
        "pass",
        "a step that one rank left is not found",
    ),
    Fault(
        "strategy_parts.py",
        "self._num_variables += uses_default_name",
        "self._num_variables += 1",
        "variables with names change the names of those without",
    ),
    Fault(
        "strategy_parts.py",
        "        if entry.replica_context is not None:\n            raise",
        "        if False:\n            raise",
        "calls of strategies are accepted inside of run",
    ),
    Fault(
        "strategy_parts.py",
        "if entry is not None and entry.strategy is not self.strategy:",
        "if False:",
        "calls in the scope of another strategy are accepted",
    ),
    Fault(
        "strategy_parts.py",
        "            error = error or problem\n        try:\n",
        "            pass\n        try:\n",
        "an error of one rank in making a strategy leaves the others waiting",
    ),
    Fault(
        "strategy_extended.py",
        "num_copies = 1 if is_one else parts.replicas.num_here",
        "num_copies = 1",
        "update changes the first ON_READ copy of a rank alone",
    ),
]
