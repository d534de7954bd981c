"""Seeded faults of the commands."""

from fault import Fault

TESTS = ["tests/cli"]
FAULTS = [
    Fault(
        "batch_job.py",
        "ntasks_per_node=ranks or gpus",
        "ntasks_per_node=ranks",
        "GPUs without ranks start one rank a node",
    ),
    Fault(
        "batch_job.py",
        "if gpus is not None and ranks is not None and ranks > gpus:",
        "if False:",
        "more ranks than GPUs are submitted",
    ),
    Fault(
        "batch_job.py",
        "if arguments.ps is not None and arguments.requeue:",
        "if False:",
        "--ps with --requeue is submitted",
    ),
    Fault(
        "batch_job.py",
        "    if there:\n",
        "    if False:\n",
        "--write-scripts overwrites files",
    ),
    Fault(
        "batch_job.py",
        "return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode",
        "return 0 * subprocess.run(command, env={**os.environ, **variables}, check=False).returncode",
        "a submission that failed is a success",
    ),
    Fault(
        "batch_job.py",
        'wanted = "pmix" if "Open MPI" in library else',
        'wanted = "pmi2" if "Open MPI" in library else',
        "Open MPI is started by pmi2",
    ),
    Fault(
        "cuda_aware_mpi.py",
        "    if child.returncode < 0:\n",
        "    if False:\n",
        "a child that crashed is not named by its signal",
    ),
    Fault(
        "cuda_aware_mpi.py",
        "    if last != _RIGHT:\n",
        "    if False:\n",
        "wrong numbers from device memory count as right",
    ),
    Fault(
        "doctor.py",
        "status = int(any(one.mark is Mark.FAIL for one in found))",
        "status = 0",
        "doctor of a broken machine is a success",
    ),
    Fault(
        "doctor_page.py",
        "        else:\n            same.nodes.append(node)",
        "        else:\n            pass",
        "nodes that are alike are left out",
    ),
    Fault(
        "findings.py",
        "wrong += not np.array_equal(total, base * factor + step * topology.size)",
        "pass",
        "wrong sums are not found",
    ),
    Fault(
        "findings.py",
        "if len(ranks) > num_cores:",
        "if False:",
        "more ranks than cores are not told",
    ),
    Fault(
        "findings.py",
        "if len(ranks) == 1 or facts.shared_bytes >= _LEAST_SHARED_BYTES:",
        "if True:",
        "a small /dev/shm is not told",
    ),
    Fault(
        "findings.py",
        "return found or [Finding(Mark.OK",
        "return [Finding(Mark.OK",
        "--expect finds nothing",
    ),
    Fault(
        "flight.py",
        "return int(any(verdict.has_diverged for verdict in verdicts))",
        "return 0",
        "flight of ranks that diverged is a success",
    ),
    Fault(
        "flight.py",
        'ranks.setdefault(re.sub(r" on rank \\d+", "", file.reason), []).append(rank)',
        "ranks.setdefault(file.reason, []).append(rank)",
        "one reason is told once a rank",
    ),
    Fault(
        "flight_job.py",
        "return max(times, key=lambda job: (times[job], job.name))",
        "return min(times, key=lambda job: (times[job], job.name))",
        "flight shows the oldest job",
    ),
    Fault(
        "flight_job.py",
        "    if version != FILE_VERSION:\n",
        "    if False:\n",
        "files of another version are misread",
    ),
    Fault(
        "flight_job.py",
        "return [rank for rank in range(self.size) if rank not in self.ranks]",
        "return []",
        "ranks without a file are not named",
    ),
    Fault(
        "flight_verdict.py",
        "        if len(by_name) > 1:\n",
        "        if False:\n",
        "ranks that made different calls are not told",
    ),
    Fault(
        "flight_verdict.py",
        "if len(sides) > 1 and sequence not in agreed:",
        "if len(sides) > 1:",
        "details that may differ are told as a difference",
    ),
    Fault(
        "flight_verdict.py",
        "late = [rank for rank, call in lasts.items() if call.begun > given_up]",
        "late = []",
        "ranks that came too late are not named",
    ),
    Fault(
        "measure_costs.py",
        "return nbytes / max(seconds - besides, seconds / 2)",
        "return nbytes / seconds",
        "measured rates include the barrier",
    ),
    Fault(
        "rank_facts.py",
        "return max(map(int, found), default=0)",
        "return min(map(int, found), default=0)",
        "the number of threads is the smallest variable's",
    ),
    Fault(
        "tune.py",
        "if group.settings.pretend_nodes is not None:\n        return None, (",
        "if False:\n        return None, (",
        "what pretended nodes measure is kept",
    ),
    Fault(
        "tune.py",
        "        if min(placement) > 0:\n",
        "        if True:\n",
        "a placement with an empty node is accepted",
    ),
    Fault(
        "trace/command.py",
        "        partial.replace(path)  # readers find a whole file",
        "        partial.rename(path.with_name(path.name + '.new'))",
        "the merged trace is under another name",
    ),
    Fault(
        "trace/command.py",
        "if sums[late] >= _OFTEN * total:",
        "if True:",
        "a rank is blamed though none stands out",
    ),
    Fault(
        "trace/events.py",
        "base = min(trace.begun for strategy",
        "base = max(trace.begun for strategy",
        "times of a trace are negative",
    ),
    Fault(
        "trace/events.py",
        "rows[row] = thread, call.ended",
        "pass",
        "started calls lie over each other",
    ),
]
