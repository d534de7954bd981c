"""What calls cost on a GPU: for the caller, beside others, through the host, behind a backward pass, after a failure.

Two ranks that share the GPU pretend to be on two nodes, so that MPI carries between them. They take turns on the GPU,
which real ranks do not: so for the backward pass streams wait, and no kernel of one rank keeps the other one waiting.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import mpidist
from gpu.bench import Bench, Call, compare, torch_of_gpus
from gpu.kernels import shapes_of
from gpu.report import Report, text_of
from gpu.running import HOSTIDS, settings_of

PIECE, PACK = 4 << 20, 4 << 20  # bytes of a message between hosts; of gradients that are reduced together, at least
CHUNKS = str(2 << 20)  # bytes, as between hosts with a link as fast as this memory: MPIDIST_STAGING_BYTES
BACKWARD = 2.0  # how many times as long as the reductions
MOST_HOST = 0.4e-3  # seconds that the caller of 161 arrays waits
SIZES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)  # bytes of an array
TURNS, TURNS_OF_LISTS = 15, 5  # of calls of ranks that may share a GPU, where NCCL takes milliseconds for an array
LEAST_OF_PEERS = 0.9  # of what NCCL and torch take, which compare no calls between ranks
DEADLINE, HELD, MOST_RESET = 1.0, 4.0, 10.0
Peer = Callable[[Sequence[Any]], Call]  # makes the call that reduces arrays in place


def reduce(strategy: Any, value: Any, op: str = "sum", **more: Any) -> Any:
    """Call `all_reduce` as a user does."""
    return strategy.run(lambda: mpidist.get_replica_context().all_reduce(op, value, **more))


def start(value: Any, out: Any, op: str = "sum") -> Any:
    """Call `start_all_reduce` as a user does in `run`."""
    return mpidist.get_replica_context().start_all_reduce(op, value, out=out)


def sums(bench: Bench, arrays: Sequence[Any], call: Call) -> None:
    """Let each rank contribute its number, plus 1, and look at the sums. Collective."""
    for array in arrays:
        array[...] = bench.rank + 1
    call()
    bench.synchronize()
    for array in arrays:
        bench.require_equal("a sum", array, np.full(array.shape, sum(range(bench.size + 1)), array.dtype))


def strategy_over_mpi(bench: Bench) -> Any:
    """Return a strategy whose device memory goes through the host, between ranks on devices of the bench's."""
    bench.cupy.zeros(1)  # before the strategy looks which device is the current one
    os.environ.update(MPIDIST_NCCL="0", MPIDIST_PRETEND_NODES=",".join(map(str, range(bench.size))))
    return mpidist.MultiWorkerMirroredStrategy()


def public_call(bench: Bench, report: Report) -> None:
    """Time what the caller of 161 arrays waits. For one rank: it looks at arguments, and makes results."""
    arrays = [bench.cupy.ones(shape, np.float32) for shape in shapes_of(bench)]
    outs = [bench.cupy.empty_like(array) for array in arrays]
    for out in outs:
        bench.poison(out)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        mean = partial(reduce, strategy, arrays, "mean")
        ways: dict[str, Call] = {
            "new results": mean,
            "out= given": partial(mean, out=outs),
            "in place": partial(mean, out=arrays),
            "started, and waited for": lambda: strategy.run(start, (arrays, outs, "mean")).wait(),
        }
        for name, times in bench.times(ways, 50, "host").items():
            question = f"all_reduce of {len(arrays)} arrays, 1 rank, {name}: what the caller waits"
            report.at_most(question, times, MOST_HOST)
        for array in (*arrays, *outs):
            bench.require_equal("mean of one rank", array, np.ones(array.shape, np.float32))


def peers(bench: Bench, report: Report) -> None:
    """Time the public call beside NCCL that CuPy calls, and `torch.distributed`, on the same arrays. Collective."""
    least, note = LEAST_OF_PEERS, ""
    if bench.cuda.support.num_devices < bench.size:
        os.environ["NCCL_HOSTID"], least, note = f"rank{bench.rank}", None, "ranks share a GPU"
    else:  # NCCL as it is
        for name in settings_of(HOSTIDS):
            os.environ.pop(name, None)
    others = {"NCCL alone": over_nccl(bench), "torch.distributed": over_torch(bench, report)}
    lists = {f"{nbytes} bytes": [(nbytes // 4,)] for nbytes in map(bench.nbytes, SIZES)}
    lists[f"{len(shapes_of(bench))} arrays"] = shapes_of(bench)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        for name, shapes in lists.items():
            arrays = [bench.cupy.empty(shape, np.float32) for shape in shapes]
            ways: dict[str, Call] = {"ours": partial(reduce, strategy, arrays, out=arrays)}
            ways |= {name: peer(arrays) for name, peer in others.items() if peer is not None}
            for way in ways.values():
                sums(bench, arrays, way)
            for array in arrays:
                array[...] = 0  # and stays it, however often it is added
            times = bench.times(ways, TURNS if len(arrays) == 1 else TURNS_OF_LISTS)
            compare(report, f"all_reduce of {name}, {bench.size} ranks", times, least, note)


def over_nccl(bench: Bench) -> Peer:
    """Return what calls NCCL's all-reduce for each array, in one group. Collective."""
    nccl, cupy = bench.cuda.nccl, bench.cupy  # which makes this rank's GPU the current one
    comm = nccl.NcclCommunicator(bench.size, bench.comm.bcast(nccl.get_unique_id()), bench.rank)

    def all_reduce(arrays: Sequence[Any]) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        nccl.groupStart()
        for array in arrays:
            comm.allReduce(array.data.ptr, array.data.ptr, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
        nccl.groupEnd()

    return lambda arrays: partial(all_reduce, arrays)


def over_torch(bench: Bench, report: Report) -> Peer | None:
    """Return what calls torch's all-reduce, for a list on one buffer of all; `None` without torch. Collective."""
    torch = torch_of_gpus(report, "all_reduce")
    if torch is None:
        return None
    distributed = torch.distributed
    torch.cuda.set_device(int(bench.cupy.cuda.runtime.getDevice()))
    place = bench.comm.bcast(tempfile.mkdtemp() if bench.rank == 0 else None)
    distributed.init_process_group("nccl", f"file://{place}/meeting", rank=bench.rank, world_size=bench.size)
    atexit.register(distributed.destroy_process_group)

    def all_reduce(flats: Sequence[Any]) -> None:
        whole = flats[0] if len(flats) == 1 else torch.cat(flats)
        distributed.all_reduce(whole)
        if whole is not flats[0]:
            torch._foreach_copy_(flats, torch.split(whole, [flat.numel() for flat in flats]))

    return lambda arrays: partial(all_reduce, [torch.from_dlpack(array.reshape(-1)) for array in arrays])


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
            for at in range(0, nbytes, PIECE):
                bench.comm.Sendrecv(sent[at : at + PIECE], peer, 7, received[at : at + PIECE], peer, 7)

        ways: dict[str, Call] = {"ours": partial(reduce, strategy, array, out=array), "whole messages": whole}
        for call in ways.values():
            sums(bench, [array], call)
        array[...] = 0
        stages: dict[str, Call] = {"down": lambda: room.get(out=sent), "up": lambda: room.set(sent), "MPI": exchange}
        times = bench.times(ways | stages, 8)
        slowest = max(stages, key=lambda name: np.median(times[name]))
        note = ", ".join(f"{name} {text_of(its)}" for name, its in times.items())
        question = f"all-reduce of {nbytes / 1e6:.0f} MB, 2 ranks over MPI"
        for name, least in ((slowest, 0.8), ("whole messages", 1.5)):
            compare(report, question, {"ours": times["ours"], name: times[name]}, least, note)


def overlap(bench: Bench, report: Report) -> None:
    """See how much of the reductions hides behind a backward pass that takes twice as long. Collective."""
    os.environ["MPIDIST_STAGING_BYTES"] = CHUNKS
    with strategy_over_mpi(bench) as strategy:
        gradients = [bench.cupy.empty(shape, np.float32) for shape in reversed(shapes_of(bench))]
        packs: list[list[Any]] = [[]]
        for array in gradients:
            if sum(int(its.nbytes) for its in packs[-1]) >= PACK:
                packs.append([])
            packs[-1].append(array)
        elements, seconds = sum(int(its.size) for its in gradients), 0.0

        def compute(begin: Callable[[Any], object] = len) -> None:
            for pack in packs:
                for array in pack:
                    array[...] = bench.rank + 1
                bench.idle(seconds * sum(int(array.size) for array in pack) / elements)
                begin(pack)

        def after() -> None:
            compute()
            reduce(strategy, gradients, out=gradients)

        def early() -> None:
            handles: list[Any] = []
            strategy.run(compute, (lambda pack: handles.append(start(pack, pack)),))
            for handle in handles:
                handle.wait()

        sums(bench, gradients, after)
        sums(bench, gradients, early)
        seconds = BACKWARD * float(np.median(bench.times({"": after}, 5)[""]))
        times = bench.times({"compute": compute, "after": after, "early": early}, 8)
        sums(bench, gradients, early)
        alone, late, soon = (float(np.median(its)) for its in times.values())
        note = ", ".join(f"{name} {text_of(its)}" for name, its in times.items())
        if late <= alone and not bench.is_tiny:
            raise ArithmeticError(f"there was nothing to hide: {note}")
        hidden = (late - soon) / (late - alone) if late > alone else 0.0
        question = f"backward of {len(gradients)} tensors, {bench.size} ranks over MPI: reductions that are hidden"
        report.add(question, f"{hidden:.0%}", goal=("at least 90%", hidden >= 0.9), note=note)


def faults(bench: Bench, report: Report) -> None:
    """Over real NCCL: a deadline and an abort with a kernel in flight, and a new start. Collective."""
    os.environ["NCCL_HOSTID"] = f"rank{bench.rank}"  # as NCCL wants a GPU for each rank of a host
    array = bench.cupy.empty(1 << 18, np.float32)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        call = partial(reduce, strategy, array, out=array)
        sums(bench, [array], call)
        if bench.rank == bench.size - 1:
            bench.hold(HELD)  # so that NCCL's kernels of the others wait
        begun = perf_counter()
        with suppress(mpidist.errors.DeadlineExceededError, mpidist.errors.PeerFailedError):
            call(options=mpidist.CommunicationOptions(timeout_seconds=DEADLINE))
            raise ArithmeticError(f"a call of {HELD:g} s was done before its deadline of {DEADLINE:g} s")
        report.at_most(f"a deadline of {DEADLINE:g} s with a kernel in flight", bench.since(begun), DEADLINE + 1)
        begun = perf_counter()
        strategy.reset()
        sums(bench, [array], call)
        report.at_most("reset() after the abort, and a call, on all ranks", bench.since(begun), MOST_RESET)
