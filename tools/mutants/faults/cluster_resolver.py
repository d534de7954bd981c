"""Seeded faults of the cluster resolvers."""

from fault import Fault

TESTS = ["tests/cluster_resolver", "tests/strategies/test_refused_strategies.py"]
FAULTS = [
    Fault(
        "cluster_spec.py",
        "        seen[host] += 1",
        "        pass",
        "tasks of one host share a port",
    ),
    Fault(
        "cluster_spec.py",
        'return f"{rpc_layer}://{address}" if address and rpc_layer else address',
        "return address",
        "the rpc layer is missing",
    ),
    Fault(
        "cluster_spec.py",
        "return dict(sorted(by_index.items()))",
        "return dict(by_index.items())",
        "tasks given out of order keep that order",
    ),
    Fault(
        "cluster_spec.py",
        "if not isinstance(index, int) or index < 0:",
        "if not isinstance(index, int):",
        "negative task indices are accepted",
    ),
    Fault(
        "cluster_spec.py",
        "return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]",
        "return list(tasks.values())",
        "a gap in a job moves the tasks behind it",
    ),
    Fault(
        "cluster_spec.py",
        "int(key) if isinstance(key, str) and key.isdecimal() else key",
        "key",
        "indices that JSON has made texts are refused",
    ),
    Fault(
        "gpus.py",
        "return list(takewhile(lambda name:",
        "return list(filter(lambda name:",
        "GPUs after an invalid name are counted",
    ),
    Fault(
        "gpus.py",
        "        local_rank, num_sharing = 0, 1",
        "        pass",
        "GPUs that Slurm has bound to a task are divided once more",
    ),
    Fault(
        "gpus.py",
        "if gpus_per_task * num_sharing > len(visible):",
        "if False:",
        "more GPUs than there are can be asked for",
    ),
    Fault(
        "gpus.py",
        "visible[local_rank * gpus_per_task : (local_rank + 1) * gpus_per_task]",
        "visible[:gpus_per_task]",
        "all tasks of a node take the first GPU",
    ),
    Fault(
        "host_list.py",
        'numbers += [f"{number:0{len(low)}d}" for',
        'numbers += [f"{number}" for',
        "n[01-03] loses its zeros",
    ),
    Fault(
        "host_list.py",
        'counts += [int(match["count"])] * int(match["times"] or 1)',
        'counts += [int(match["count"])]',
        "2(x3) is one node",
    ),
    Fault(
        "host_list.py",
        "if int(high) < int(low):",
        "if False:",
        "a range that runs backwards is empty",
    ),
    Fault(
        "mpi.py",
        'resolver._cluster_spec = ClusterSpec({"worker": number_ports(topology.hostnames)})',
        "pass",
        "asking a strategy's resolver is collective",
    ),
    Fault(
        "resolver.py",
        "if self.num_tasks is not None and self.num_tasks != size:",
        "if False:",
        "a cluster of another size is accepted",
    ),
    Fault(
        "resolver.py",
        "if self.rank is not None and self.rank != rank:",
        "if False:",
        "a task with another rank is accepted",
    ),
    Fault(
        "resolver.py",
        "if not len(pairs) == len(set(assumed)) == len(set(hostnames)):",
        "if False:",
        "a layout that was guessed wrongly is accepted",
    ),
    Fault(
        "resolver.py",
        'return task_id + (spec.num_tasks("chief") if task_type == "worker" and "chief" in spec.jobs else 0)',
        "return task_id",
        "worker 0 has the chief's number",
    ),
    Fault(
        "resolver.py",
        "if task_id not in ids:",
        "if False:",
        "a task id above the largest is accepted",
    ),
    Fault(
        "slurm.py",
        "if rank >= num_tasks:",
        "if False:",
        "a rank outside of the step is an IndexError",
    ),
    Fault(
        "slurm.py",
        'environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)',
        "pass",
        "auto_set_gpu is of no effect",
    ),
    Fault(
        "slurm.py",
        "counts = [max(0, min(given, num_tasks - given * node)) for node in range(len(hosts))]",
        "counts = [given for node in range(len(hosts))]",
        "a last node with fewer tasks is refused",
    ),
    Fault(
        "slurm.py",
        'jobs = sorted((self._jobs or {"worker": num_tasks}).items())',
        'jobs = list((self._jobs or {"worker": num_tasks}).items())',
        "jobs get their ranks in the order given",
    ),
    Fault(
        "slurm.py",
        "turns = [(task // num_together, place, host)",
        "turns = [(task, place, host)",
        "block is taken for cyclic",
    ),
    Fault(
        "slurm.py",
        "        if environ.get(name, value) != value:",
        "        if False:",
        "variables that contradict the layout are accepted",
    ),
    Fault(
        "slurm.py",
        "return fitting[0], any(layout != fitting[0] for layout in fitting)",
        "return fitting[0], False",
        "an assumed layout counts as known",
    ),
    Fault(
        "tf_config.py",
        "if session_master is not None:",
        "if False:",
        "session_master of TF_CONFIG is ignored",
    ),
    Fault(
        "simple.py",
        "if task_type is not None and task_id is not None:",
        "if False:",
        "master of another task is that of this one",
    ),
]
