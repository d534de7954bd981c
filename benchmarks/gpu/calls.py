"""What calls cost on a GPU: for the caller, through the host, behind a backward pass, and after a failure.

Two ranks that share the GPU pretend to be on two nodes, so that MPI carries between them, through shared memory. They
take turns on the GPU, which real ranks do not: of the overlap, the hidden part is what is looked at, not the times.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import mpidist
from gpu.bench import Bench, Call, text_of, time_text
from gpu.kernels import shapes_of
from gpu.report import Report
from mpidist.errors import DeadlineExceededError, PeerFailedError

__all__ = ["faults", "overlap", "public_call", "staging"]

MOST_BYTES = 4 << 20  # of the host: the driver's own memory grows, too
PIECE = 4 << 20  # of a message between hosts
PACK = 40  # gradients: the first ones, of the last layers, are the large ones
MOST_HOST = 0.4e-3  # seconds that the caller of 161 arrays waits
DEADLINE, HELD, MOST_RESET = 1.0, 4.0, 10.0
COUNT = 1 << 18


def reduce(strategy: Any, value: Any, op: str = "sum", **more: Any) -> Any:
    """Call `all_reduce` as a user does."""
    return strategy.run(lambda: mpidist.get_replica_context().all_reduce(op, value, **more))


def strategy_over_mpi(bench: Bench) -> Any:
    """Return a strategy whose device memory goes through the host, between ranks on devices of the bench's."""
    bench.cupy.zeros(1)  # before the strategy looks which device is the current one
    os.environ.update(MPIDIST_NCCL="0", MPIDIST_PRETEND_NODES=",".join(map(str, range(bench.size))))
    return mpidist.MultiWorkerMirroredStrategy()


def public_call(bench: Bench, report: Report) -> None:
    """Time what the caller of 161 arrays waits, and see what the calls leave behind. For one rank.

    One rank neither packs nor calls NCCL: the times are those of looking at arguments, and of results.
    """
    arrays = [bench.cupy.ones(shape, np.float32) for shape in shapes_of(bench)]
    outs = [bench.cupy.empty_like(array) for array in arrays]
    for out in outs:
        bench.poison(out)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:

        def started() -> None:
            strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("mean", arrays, out=outs).wait())

        ways: dict[str, list[Call]] = {
            "new results": [partial(reduce, strategy, arrays, "mean")],
            "out= given": [partial(reduce, strategy, arrays, "mean", out=outs)],
            "in place": [partial(reduce, strategy, arrays, "mean", out=arrays)],
            "started, and waited for": [started],
        }
        for name, times in bench.times(ways, 50, "host").items():
            question = f"all_reduce of {len(arrays)} arrays, 1 rank, {name}: what the caller waits"
            goal = f"at most {time_text(MOST_HOST)}", bool(np.median(times) <= MOST_HOST)
            report.add(question, text_of(times), goal=goal)
        for array in (*arrays, *outs):
            bench.require_equal("mean of one rank", array, np.ones(array.shape, np.float32))
        look_for_leaks(bench, report, [call for (call,) in ways.values()])


def look_for_leaks(bench: Bench, report: Report, calls: list[Call]) -> None:
    """See what memory many turns of calls, all of which have been made before, leave behind."""
    pool, pinned = bench.cupy.get_default_memory_pool(), bench.cupy.get_default_pinned_memory_pool()

    def held() -> np.ndarray:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return np.array([pool.total_bytes(), pinned.n_free_blocks(), most])

    before, turns = held(), bench.turns(300)
    for _ in range(turns):
        for call in calls:
            call()
    on_gpu, blocks, on_host = (held() - before).tolist()
    got = f"{on_gpu} bytes of the GPU, {blocks} pinned blocks, {on_host >> 10} KiB of the host"
    is_clean = on_gpu == blocks == 0 and on_host <= MOST_BYTES
    report.add(f"memory that {turns * len(calls)} calls leave behind", got, goal=("none", is_clean))


def staging(bench: Bench, report: Report) -> None:
    """Time 100 MB beside the slowest of their stages, and beside whole messages. Collective, for 2 ranks."""
    from mpi4py import MPI

    with strategy_over_mpi(bench) as strategy:
        array = bench.cupy.empty(bench.nbytes(100 << 20) // 4, np.float32)
        nbytes, peer, pinned = int(array.nbytes), bench.rank ^ 1, bench.cupy.cuda.alloc_pinned_memory
        sent, received = (np.frombuffer(pinned(nbytes), np.uint8, nbytes) for _ in range(2))
        room = bench.cupy.zeros(nbytes, np.uint8)

        def whole() -> None:
            host = array.get()  # made for each call and not pinned, as others do
            bench.comm.Allreduce(MPI.IN_PLACE, host)
            array.set(host)

        def exchange() -> None:
            for part in (slice(at, at + PIECE) for at in range(0, nbytes, PIECE)):
                bench.comm.Sendrecv(sent[part], peer, 7, received[part], peer, 7)

        sums: dict[str, Call] = {"ours": partial(reduce, strategy, array, out=array), "whole messages": whole}
        down, up = (lambda: room.get(out=sent)), (lambda: room.set(sent))
        stages: dict[str, Call] = {"stage: down": down, "stage: up": up, "stage: MPI": exchange}
        rows = [np.random.default_rng([3, at]).integers(-9, 9, array.size).astype(np.float32) for at in (0, 1)]
        for name, call in sums.items():  # of numbers whose sums are exact
            array.set(rows[bench.rank])
            call()
            bench.require_equal(name, array, rows[0] + rows[1])
        times = bench.times({name: [call] for name, call in (sums | stages).items()}, 8, "end")
        slowest = max(stages, key=lambda name: np.median(times[name]))
        note = ", ".join(f"{name} {text_of(its)}" for name, its in times.items())
        for name, least in ((slowest, 0.8), ("whole messages", 1.5)):
            ratio = float(np.median(times[name]) / np.median(times["ours"]))
            question = f"all-reduce of {nbytes / 1e6:.0f} MB, 2 ranks over MPI: {name} / ours"
            report.add(question, f"{ratio:.2f}", goal=(f"at least {least}", ratio >= least), note=note)


def overlap(bench: Bench, report: Report) -> None:
    """See how much of the reductions hides behind the backward pass, a kernel for each of 161 tensors. Collective."""
    with strategy_over_mpi(bench) as strategy:
        gradients = [bench.cupy.empty(shape, np.float32) for shape in reversed(shapes_of(bench))]
        packs = [gradients[at : at + PACK] for at in range(0, len(gradients), PACK)]
        elements, seconds = sum(int(its.size) for its in gradients), 0.0

        def compute(start: Callable[[Any], object] = len) -> None:
            for pack in packs:
                for array in pack:
                    bench.hold(seconds * int(array.size) / elements)
                    array[...] = bench.rank + 1
                start(pack)

        def after() -> None:
            compute()
            reduce(strategy, gradients, out=gradients)

        def early() -> None:
            handles: list[Any] = []
            start = mpidist.get_replica_context
            strategy.run(lambda: compute(lambda its: handles.append(start().start_all_reduce("sum", its, out=its))))
            for handle in handles:
                handle.wait()

        def check() -> None:
            for array in gradients:
                total = np.full(array.shape, sum(range(bench.size + 1)), np.float32)
                bench.require_equal("a gradient", array, total)

        for way in (after, early):
            way()
            check()
        seconds = 2 * float(np.median(bench.times({"": [after]}, 5, "end")[""])) / bench.size
        times = bench.times({"compute": [compute], "after": [after], "early": [early]}, 8, "end")
        early()
        check()
        alone, late, soon = (float(np.median(its)) for its in times.values())
        note = ", ".join(f"{name} {text_of(its)}" for name, its in times.items())
        if late <= alone and not bench.is_tiny:
            raise ArithmeticError(f"there was nothing to hide: {note}")
        hidden = (late - soon) / (late - alone) if late > alone else 0.0
        question = f"backward of {len(gradients)} kernels, {bench.size} ranks over MPI: reductions that are hidden"
        report.add(question, f"{hidden:.0%}", goal=("at least 90%", hidden >= 0.9), note=note)


def faults(bench: Bench, report: Report) -> None:
    """Over real NCCL: a deadline and an abort with a kernel in flight, a new start, torch's tensors. Collective."""
    os.environ["NCCL_HOSTID"] = f"rank{bench.rank}"  # as NCCL wants a GPU for each rank of a host
    array = bench.cupy.ones(COUNT, np.float32)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        total = np.full(COUNT, bench.size, np.float32)
        bench.require_equal("a sum", reduce(strategy, array), total)
        with report.question("a deadline with a kernel in flight"):
            slowest = max(bench.comm.allgather(ended_by_deadline(bench, strategy, array)))
            goal = "on all ranks at most 1 s later", slowest < DEADLINE + 1
            report.add(
                f"a deadline of {DEADLINE:g} s with a kernel in flight", f"an error within {slowest:.2f} s", goal=goal
            )
            start = perf_counter()
            strategy.reset()
            bench.require_equal("a sum after reset()", reduce(strategy, array), total)
            slowest = max(bench.comm.allgather(perf_counter() - start))
            goal = f"at most {MOST_RESET:g} s on all ranks", slowest <= MOST_RESET
            report.add("reset() after the abort, and a call", f"{slowest:.2f} s", goal=goal)
        with report.question("tensors of torch, bfloat16, on a side stream"):
            reduce_tensors(bench, report, strategy)


def ended_by_deadline(bench: Bench, strategy: Any, array: Any) -> float:
    """Reduce while the last rank's GPU is busy: NCCL's kernel of the others is in flight. Return what the error took.

    Raises:
        ArithmeticError: If there was no error.
    """
    if bench.rank == bench.size - 1:
        bench.hold(HELD)
    start = perf_counter()
    try:
        reduce(strategy, array, options=mpidist.CommunicationOptions(timeout_seconds=DEADLINE))
    except (DeadlineExceededError, PeerFailedError):
        return perf_counter() - start
    raise ArithmeticError(f"a call of {HELD:g} s was done before its deadline of {DEADLINE:g} s")


def reduce_tensors(bench: Bench, report: Report, strategy: Any) -> None:
    """Reduce tensors that a side stream is about to write. Collective."""
    try:
        import torch
    except ModuleNotFoundError:
        report.add("tensors of torch on a side stream", "torch is not installed")
        return
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.zeros(COUNT, dtype=dtype, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()) as stream, bench.cupy.cuda.ExternalStream(stream.cuda_stream):
            bench.hold(0.01)
            tensor += bench.rank + 1
            total = reduce(strategy, tensor)
        torch.cuda.synchronize()
        is_right = total.dtype == dtype and bool((total == sum(range(bench.size + 1))).all())
        report.add(f"a tensor of {dtype} on a side stream", "a sum" if is_right else "no sum", is_right)
