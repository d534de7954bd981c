"""Seeded faults of the strategies: what they are made of, and what they refuse."""

from fault import Fault

TESTS = ["tests/strategies", "tests/test_run_and_reduce.py", "tests/parameter_server"]
FAULTS = [
    Fault(
        "central_storage.py",
        "if group.topology.size > 1 or len(chosen) > 1:",
        "if False:",
        "the variables of central storage are one copy a rank",
    ),
    Fault(
        "central_storage.py",
        "if not device.is_gpu or (num_ranks == 1 and list(chosen) == [device]):",
        "if True:",
        "a GPU as parameter device of several ranks is accepted",
    ),
    Fault(
        "central_storage.py",
        'OncePerNode(group, options, "/rank:0/cpu:0")',
        "OncePerNode(group, options)",
        "the device of the variables is not named",
    ),
    Fault(
        "mirrored.py",
        "communication_options, partial(OncePerNode, group) if per_node_variables else None",
        "communication_options, None",
        "per_node_variables of MirroredStrategy is of no effect",
    ),
    Fault(
        "mirrored.py",
        'require_bool("per_node_variables", per_node_variables)',
        "pass",
        "MirroredStrategy takes anything for per_node_variables",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "carried = None if replicas is None else Replicas.in_blocks(replicas, group.topology)",
        "carried = None",
        "replicas= is of no effect",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "default = CollectiveAllReduce() if group.topology.num_nodes == 1 else HierarchicalCopyAllReduce()",
        "default = CollectiveAllReduce()",
        "on several nodes the default is not hierarchical",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "ops = cross_device_ops if cross_device_ops is not None else default",
        "ops = default",
        "cross_device_ops of MultiWorkerMirroredStrategy is ignored",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "placement = partial(OncePerNode, group) if per_node_variables else None",
        "placement = None",
        "per_node_variables of MultiWorkerMirroredStrategy is of no effect",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "CollectiveAllReduce() if group.topology.num_nodes == 1 else HierarchicalCopyAllReduce()",
        "CollectiveAllReduce()",
        "the default algorithm of several nodes is that of one",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "                _require_resolver(cluster_resolver)\n",
        "",
        "what is no resolver is an AttributeError",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "carried = None if replicas is None else Replicas.in_blocks(replicas, group.topology)",
        "carried = None",
        "replicas= of MultiWorkerMirroredStrategy is of no effect",
    ),
    Fault(
        "multi_worker_mirrored.py",
        "super().__init__(parts, resolver)",
        "super().__init__(parts)",
        "the strategy has no resolver",
    ),
    Fault(
        "one_device.py",
        "chosen = choose_device(group.topology) if device is None else Device.parse(device)",
        'chosen = Device("cpu")',
        "the device of OneDeviceStrategy is ignored",
    ),
    Fault(
        "parameter_server.py",
        "return max(1, len(self._role.roles.servers))",
        "return len(self._role.roles.servers)",
        "one rank alone has no server",
    ),
    Fault(
        "parameter_server.py",
        "outs = values = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]",
        "outs = values = [np.empty(leaf.shape) for leaf in leaves]",
        "read returns another dtype",
    ),
    Fault(
        "parameter_server.py",
        "if values is not outs:",
        "if False:",
        "out arrays with strides stay as they were",
    ),
    Fault(
        "parameter_server.py",
        "if form != its_form:",
        "if False:",
        "push takes a nest of another form",
    ),
    Fault(
        "parameter_server.py",
        "rule.require_dtype(leaf.name, leaf.dtype)",
        "pass",
        "a rule with fractions is applied to whole numbers",
    ),
    Fault(
        "parameter_server.py",
        '"assign_sub": Change.SUB}',
        '"assign_sub": Change.ADD}',
        "push with assign_sub adds",
    ),
    Fault(
        "parameter_server.py",
        "servers.push(Push.sum_of(pushes))",
        "servers.push(pushes[0])",
        "of the replicas of a worker only the first pushes",
    ),
    Fault(
        "parameter_server.py",
        "rows += [changes.get(shard.key) or RowsChange.none(shard) for shard in shards]",
        "rows += [changes[shard.key] for shard in shards if shard.key in changes]",
        "shards without rows are left out of a push",
    ),
    Fault(
        "parameter_server.py",
        "is_worker = not self._strategy.is_ps and not self._strategy.is_chief",
        "is_worker = False",
        "Server(strategy).join() on a worker does no work",
    ),
]
