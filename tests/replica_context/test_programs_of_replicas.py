"""Random programs of reductions and assignments: the same bits as a plain loop over the replicas, on any ranks."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.contributions import in_tree_order
from support.ranks import Intracomm

from mpidist import MultiWorkerMirroredStrategy, Variable, get_replica_context

RULES = ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE", "ON_READ SUM", "ON_READ MEAN")
SHAPE = (7,)
SLOW = [HealthCheck.too_slow]  # on a busy machine


class Step(NamedTuple):
    """One step of a program: what every replica does."""

    kind: str  # `"reduce"`, `"assign"`, `"assign_add"` or `"assign_sub"`
    variable: int  # which variable takes part
    seed: int  # of the numbers


PROGRAMS = st.lists(
    st.builds(
        Step, st.sampled_from(["reduce", "assign", "assign_add", "assign_sub"]), st.integers(0, 5), st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)
CHANGES = {"assign": lambda old, new: new, "assign_add": np.add, "assign_sub": np.subtract}


def numbers(seed: int, replica: int) -> Any:
    """Numbers of very different sizes. What is assigned without an aggregation is the same on all replicas."""
    rng = np.random.default_rng([seed, replica])
    return (rng.normal(size=SHAPE) * 10.0 ** rng.integers(-3, 3, SHAPE)).astype(np.float32)


def add(parts: list[Any]) -> Any:
    return in_tree_order(np.add, parts)


def aggregate(rule: str, parts: list[Any]) -> Any:
    if rule == "SUM":
        return add(parts)
    return (add(parts) / len(parts)).astype(np.float32) if rule == "MEAN" else parts[0]


def simulate(program: list[Step], total: int) -> list[Any]:
    """Run a program in one loop over the replicas, without this library. Returns what the variables read at the end."""
    mirrored = [np.ones(SHAPE, np.float32) for _ in RULES]
    own = [[np.ones(SHAPE, np.float32) for _ in range(total)] for _ in RULES]
    for step in program:
        rule = RULES[step.variable]
        parts = [numbers(step.seed, 0 if rule == "NONE" else replica) for replica in range(total)]
        if step.kind == "reduce":  # each replica adds the mean of all to its metrics
            mean = (add(parts) / total).astype(np.float32)
            for at in (4, 5):
                own[at] = [copy + mean for copy in own[at]]
        elif rule.startswith("ON_READ"):
            copies = own[step.variable]
            own[step.variable] = [CHANGES[step.kind](old, new) for old, new in zip(copies, parts, strict=True)]
        else:
            mirrored[step.variable] = CHANGES[step.kind](mirrored[step.variable], aggregate(rule, parts))
    return [*mirrored[:4], add(own[4]), (add(own[5]) / total).astype(np.float32)]


def run(strategy: Any, program: list[Step]) -> list[Any]:
    with strategy.scope():
        variables = [
            Variable(
                np.ones(SHAPE, np.float32),
                aggregation=rule.split()[-1],
                synchronization="ON_READ" if rule.startswith("ON_READ") else "AUTO",
            )
            for rule in RULES
        ]

    def body() -> None:
        context = get_replica_context()
        assert context is not None
        for step in program:
            is_alike = RULES[step.variable] == "NONE"
            value = numbers(step.seed, 0 if is_alike else context.replica_id_in_sync_group)
            if step.kind == "reduce":
                mean = context.all_reduce("mean", value)
                for at in (4, 5):
                    variables[at].assign_add(mean)
            else:
                getattr(variables[step.variable], step.kind)(value)

    strategy.run(body)
    return [variable.numpy() for variable in variables]


def test_programs_give_the_bits_of_a_plain_loop(comm: Intracomm, placement: tuple[int, ...]) -> None:
    totals = np.random.default_rng([*placement]).integers(comm.size, 17, 2)
    strategies = [MultiWorkerMirroredStrategy(replicas=int(total)) for total in totals]

    @settings(max_examples=6, database=None, derandomize=True, deadline=None, suppress_health_check=SLOW)
    @given(PROGRAMS)
    def compare(program: list[Step]) -> None:
        for strategy in strategies:
            expected = simulate(program, strategy.num_replicas_in_sync)
            for rule, got, wanted in zip(RULES, run(strategy, program), expected, strict=True):
                assert got.tobytes() == wanted.tobytes(), (rule, strategy.num_replicas_in_sync)

    compare()
    for strategy in strategies:
        strategy.close()
