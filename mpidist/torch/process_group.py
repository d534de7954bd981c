"""The process group `mpidist` of torch.distributed: torch's calls, in torch's forms, on tensors in host memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.autograd import profiler

from mpidist.collectives.arguments.out_arrays import copy_overwritten
from mpidist.collectives.open_call import PendingResult
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.errors import DeadlineExceededError
from mpidist.options import CommunicationOptions
from mpidist.torch.nccl import has_cuda_tensors, make_nccl_group, takes_cuda
from mpidist.torch.sparse_tensors import is_sparse, slices_of, write_slices
from mpidist.torch.work import MpiWork
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.arrays import memory_bounds
from mpidist.transport.group.messages import Message, Messages
from mpidist.transport.group.started_calls import Pending, Steps, Workplace, steps_of
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.shared_errors import following_of
from mpidist.transport.waiting import is_pausing

__all__ = ["MpiProcessGroup", "make_process_group"]

logger = logging.getLogger("mpidist.torch")

_REDUCE_OPS: Final = {"SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_OF_BITS: Final = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
_OF_BOOLS: Final = {"SUM": "max", "PRODUCT": "min", "MIN": "min", "MAX": "max"}  # sum: or; product: and
_OPS: Final = (*_REDUCE_OPS, *_OF_BITS)
_GIVEN: Final = "given"

_Method = Callable[..., MpiWork]


def make_process_group(options: Any) -> MpiProcessGroup:
    """Make a process group of what torch says of it. Collective over its ranks alone."""
    world = load_mpi().COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    tag = fingerprint_of(str(options.group_id)) % 20000
    comm = world.Create_group(world.group.Incl(ranks), tag)
    if (comm.rank, comm.size) != (options.group_rank, options.group_size):
        raise ValueError(
            f"torch takes this process for rank {options.group_rank} of {options.group_size}, and MPI for {comm.rank} "
            f"of {comm.size}: leave RANK and WORLD_SIZE unset, or give the numbers of MPI"
        )
    try:
        return MpiProcessGroup(options.store, comm, options.timeout, str(options.group_id))
    finally:
        comm.Free()


def _bytes_of(tensor: Any) -> Any:
    """View the memory of a tensor in row-major order as bytes, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _in_rows(tensor: Any) -> Any:
    """Return a tensor of the same numbers in row-major order: of the same memory, if that is so.

    Raises:
        TypeError: If it is not a dense tensor in host memory.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor is {tensor.layout} on {tensor.device}, and a dense one in host memory is needed")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _call_of_torch(name: str, starts_itself: bool = False) -> Callable[[_Method], _Method]:
    """Make a method a call of torch: NCCL takes CUDA tensors, torch's profiler shows it, `async_op=True` starts it."""

    def decorated(method: _Method) -> _Method:
        @wraps(method)
        def shown(group: MpiProcessGroup, *arguments: Any, **options: Any) -> MpiWork:
            if any(map(has_cuda_tensors, arguments)):
                of_nccl: MpiWork = getattr(group._nccl_group(name), method.__name__)(*arguments, **options)
                return of_nccl
            run = partial(method, group, *arguments, **options)
            with profiler.record_function(f"mpidist:{name}") if profiler._is_profiler_enabled else nullcontext():
                return run() if starts_itself else group._start(run, (*arguments, *options.values()))

        return shown

    return decorated


def _name_of(opts: Any) -> str:
    op = getattr(opts, "reduceOp", None)
    number = int(getattr(op, "op", 0 if op is None else op))
    return next((name for name in _OPS if int(getattr(dist.ReduceOp, name)) == number), str(op))


def _real_views(tensors: Sequence[Any], name: str) -> tuple[list[Any], str]:
    """Return views of dtypes that are reduced, and the reduction's name for them.

    Raises:
        ValueError: If torch has no such reduction of these tensors.
    """
    tensors = [tensor.detach() for tensor in tensors]
    kinds = {tensor.dtype for tensor in tensors}
    if torch.bool in kinds:
        if len(kinds) > 1 or name not in _OF_BOOLS:
            raise ValueError(f"reduce_op {name} of tensors of {kinds}: bool tensors have {', '.join(_OF_BOOLS)}")
        return [tensor.view(torch.uint8) for tensor in tensors], _OF_BOOLS[name]
    if name not in _REDUCE_OPS:
        raise ValueError(f"reduce_op {name} is not supported here; there are {', '.join(_REDUCE_OPS)}")
    if any(tensor.is_complex() for tensor in tensors):
        if name not in ("SUM", "AVG"):
            raise ValueError(f"reduce_op {name} of complex tensors: they have SUM and AVG")
        tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return tensors, _REDUCE_OPS[name]


@final
class MpiProcessGroup(ProcessGroup):
    """Ranks that make torch's calls together. Each call is compared on all ranks before data moves, and watched.

    Args:
        store: The ranks' store, for torch.
        comm: The ranks; the caller frees it. Making the group is collective over it.
        timeout: How long a call waits for all ranks.
        name: The name that torch gave the group.
    """

    supports_coalescing = supports_splitting = False

    def __init__(self, store: Any, comm: Intracomm, timeout: timedelta, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self._store, self._name, self._description = store, name, ""
        self._rank, self._size, self._seconds = comm.rank, comm.size, timeout.total_seconds()
        self._group = SyncGroup.from_mpi(comm)
        several = self._group.topology.num_nodes > 1
        self._ops = BoundOps(HierarchicalCopyAllReduce() if several else CollectiveAllReduce(), self._group)
        self._messages = Messages(self._group)
        self._nccl: ProcessGroup | None = None

    # What torch asks a group.

    def name(self) -> str:
        """Return the name of the backend."""
        return "mpidist"

    getBackendName = _get_backend_name = name  # noqa: N815 (torch's)

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 (torch's)
        """Return the name that torch gave the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815 (torch's)

    @property
    def group_desc(self) -> str:
        """The description that the user gave the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        """Return the ranks' store."""
        return self._store

    def _get_backend(self, device: Any) -> Any:
        is_of_nccl = torch.device(device).type == "cuda" and takes_cuda(self)
        return self._nccl_group("_get_backend")._get_backend(device) if is_of_nccl else self

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), *([torch.device("cuda")] if takes_cuda(self) else [])]

    def _nccl_group(self, call: str) -> ProcessGroup:
        """Return the group of CUDA tensors, made at the first of them; without one, all ranks refuse a collective."""
        if self._nccl is None:
            with nullcontext() if call in ("send", "recv", "_get_backend") else self._refusing(call, None):
                self._nccl = make_nccl_group(self, self._store, timedelta(seconds=self._seconds))
        return self._nccl

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.agreement.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits for all ranks."""
        self._seconds = timeout.total_seconds()
        if self._nccl is not None:
            self._nccl.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def shutdown(self) -> None:
        """Close the group. Collective; returns at once after an error, of which the other ranks are told."""
        error = sys.exc_info()[1]
        if self._nccl is not None:
            self._nccl.shutdown() if error is None else self._nccl.abort()
        if error is None:
            self._messages.free()
        try:
            self._group.close(self._seconds, error)
        except DeadlineExceededError as problem:
            if following_of(problem) is None:
                raise
            logger.warning("mpidist: a group was destroyed that other ranks had given up: %s", problem)

    abort = shutdown

    # What all calls do.

    def _seconds_of(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        own = given.total_seconds() if isinstance(given, timedelta) else 0.0
        return own if own > 0 else self._seconds

    def _options_of(self, opts: Any) -> CommunicationOptions:
        return CommunicationOptions(timeout_seconds=self._seconds_of(opts))

    @contextmanager
    def _call(
        self, name: str, opts: Any, error: Exception | None = None, variant: int = 0, **fields: Any
    ) -> Iterator[bool]:
        """Compare a call and its fields on all ranks; the body moves the data, and learns if variants are equal."""
        shown = {key: str(value) for key, value in fields.items()}
        fingerprint = fingerprint_of((name, sorted(shown.items())))
        seconds = self._seconds_of(opts)
        call = Call(name, fingerprint, lambda: shown, timeout_seconds=seconds, error=error, variant=variant)
        with self._group.call(call) as are_alike:
            yield are_alike

    @contextmanager
    def _refusing(self, call: str, opts: Any) -> Iterator[None]:
        """Raise an error of this rank's arguments on all ranks: as that of a call, which the others compare."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            with self._call(call, opts, error):
                pass

    @contextmanager
    def _written(self, call: str, opts: Any, tensor: Any) -> Iterator[Any]:
        """Give a tensor in row-major order to write to; what is written there, the tensor has afterwards."""
        with self._refusing(call, opts):
            rows = _in_rows(tensor)
        yield rows
        if rows.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(rows)

    def _start(self, run: Callable[[], MpiWork], arguments: Sequence[Any]) -> MpiWork:
        """Make a call of these arguments; if the last ones are options that ask for it, the call is only started."""
        if is_pausing() or not getattr(arguments[-1] if arguments else None, "asyncOp", False):
            return run()
        result = arguments[0] if len(arguments) > 1 else []

        def steps(started: Pending) -> Steps:
            started.sequence = self._group.agreement.sequence + 1
            return (yield from steps_of(run, started))

        started = self._group.calls.start(steps, Workplace.CALLER)
        pending = PendingResult(self._group, started, None, result, {})
        return MpiWork(result, pending.wait, pending.is_done)

    # Reductions.

    @_call_of_torch("all_reduce", starts_itself=True)
    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        """Reduce tensors in place. Always started, so that a rank may wait at once where another one does later."""
        name = _name_of(opts)
        if name in _OF_BITS:
            return self._start(partial(self._all_reduce_bits, tensors, name, opts), (tensors, opts))
        if any(map(is_sparse, tensors)):
            return self._start(partial(self._all_reduce_sparse, tensors, name, opts), (tensors, opts))
        values: list[Any] = []
        reduce_op, error = "sum", None
        try:
            values, reduce_op = _real_views(tensors, name)
        except ValueError as problem:
            error = problem
        options = self._options_of(opts)
        pending = self._ops.start_all_reduce(reduce_op, values, options, out=values, call="all_reduce", error=error)
        work = MpiWork(tensors, pending.wait, pending.is_done)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    @_call_of_torch("all_reduce_coalesced", starts_itself=True)
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        """Reduce several tensors in place, in one call."""
        return self.allreduce(tensors, opts)

    def _all_reduce_sparse(self, tensors: Sequence[Any], name: str, opts: Any) -> MpiWork:
        with self._refusing("all_reduce", opts):
            if name == "AVG" and not all(one.is_floating_point() or one.is_complex() for one in tensors):
                raise ValueError("reduce_op AVG of sparse tensors of integers, which have no mean")
            if not all(map(is_sparse, tensors)):
                raise ValueError("some of the tensors are sparse, and others not: reduce them in two calls")
        self.all_reduce_sparse_list("all_reduce", _REDUCE_OPS[name], tensors, opts)
        return MpiWork(tensors)

    def _all_reduce_bits(self, tensors: Sequence[Any], name: str, opts: Any) -> MpiWork:
        call = f"all_reduce {name}"
        for tensor in tensors:
            with self._written(call, opts, tensor) as rows:
                with self._refusing(call, opts):
                    if tensor.is_floating_point() or tensor.is_complex():
                        raise ValueError(f"reduce_op {name} of a tensor of {tensor.dtype}: needed integers or bools")
                everyone = torch.empty(self._size, rows.numel(), dtype=rows.dtype)
                counts = [rows.numel()] * self._size
                self._gather(call, rows, everyone.reshape(-1), counts, opts, shape=tuple(rows.shape))
                _bytes_of(rows)[...] = _OF_BITS[name].reduce(everyone.view(torch.uint8).numpy(), axis=0)
        return MpiWork(tensors)

    @_call_of_torch("reduce")
    def reduce(self, tensors: Sequence[Any], opts: Any) -> MpiWork:
        """Reduce a tensor to one rank; those of the other ranks stay as they are."""
        with self._refusing("reduce", opts):
            (value,), reduce_op = _real_views(tensors, _name_of(opts))
        result = self._ops.reduce(reduce_op, value, opts.rootRank, self._options_of(opts))
        if self._rank == opts.rootRank:
            value.copy_(result)
        return MpiWork(tensors)

    @_call_of_torch("reduce_scatter_single")
    def reduce_scatter_single(self, output: Any, value: Any, opts: Any = None) -> MpiWork:
        """Reduce a tensor of which each rank gets its part."""
        with self._written("reduce_scatter", opts, output) as rows:
            with self._refusing("reduce_scatter", opts):
                if value.numel() != output.numel() * self._size:
                    raise ValueError(
                        f"input has {value.numel()} elements, not {self._size} times output's {output.numel()}"
                    )
                (source, target), reduce_op = _real_views(
                    [_in_rows(value).reshape(-1), rows.reshape(-1)], _name_of(opts)
                )
            options = self._ops.options.merge(self._options_of(opts))
            reduce_scatter(
                self._group, "reduce_scatter", reduce_op, source.reshape(-1), 0, options, out=target.reshape(-1)
            )
        return MpiWork(output)

    _reduce_scatter_base = reduce_scatter_single

    @_call_of_torch("reduce_scatter_single_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> MpiWork:
        """Reduce several tensors, of which each rank gets its parts."""
        for output, one in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, one, opts)
        return MpiWork(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_call_of_torch("reduce_scatter")
    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        """Reduce lists of tensors, one for each rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.cat([part.detach().reshape(-1) for part in parts]), opts)
        return MpiWork(outputs)

    # Copies.

    @_call_of_torch("broadcast")
    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        """Copy one rank's tensors to all ranks."""
        root = 0 if opts is None else opts.rootRank
        for tensor in tensors:
            with self._written("broadcast", opts, tensor) as rows:
                spec: dict[str, Any] = {"dtype": tensor.dtype, "shape": tuple(tensor.shape), "src": root}
                with self._call("broadcast", opts, None, **spec):
                    self._group.levels.world.broadcast(_bytes_of(rows), root)
        return MpiWork(tensors)

    def _gather(self, call: str, own: Any, flat: Any, counts: Sequence[int], opts: Any, **fields: Any) -> None:
        """Copy the tensors of all ranks, which have so many elements, into a flat one. Collective."""
        with self._refusing(call, opts):
            own = _in_rows(own)
            if own.dtype != flat.dtype:
                raise TypeError(f"the input is {own.dtype}, and the output {flat.dtype}")
            if (len(counts), sum(counts), counts[self._rank]) != (self._size, flat.numel(), own.numel()):
                raise ValueError(f"the input has {own.numel()} elements, the output {flat.numel()} of {counts} by rank")
        bounds = [flat.element_size() * sum(counts[:at]) for at in range(self._size + 1)]
        with self._call(call, opts, dtype=flat.dtype, **fields):
            flat.split(list(counts))[self._rank].copy_(own.reshape(-1))
            self._group.levels.world.all_gather(_bytes_of(flat), bounds)

    @_call_of_torch("all_gather")
    def allgather(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        """Copy the tensors of all ranks to lists of all ranks."""
        for outs, one in zip(outputs, inputs, strict=True):
            counts = [out.numel() for out in outs]
            flat = torch.empty(sum(counts), dtype=one.dtype)
            self._gather("all_gather", one, flat, counts, opts, sizes=counts)
            for out, part in zip(outs, flat.split(counts), strict=True):
                out.detach().copy_(part.view(out.shape))
        return MpiWork(outputs)

    @_call_of_torch("all_gather_coalesced")
    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        """Copy several tensors of all ranks to lists of all ranks."""
        self.allgather([[one[at] for one in output_lists] for at in range(len(inputs))], inputs, opts)
        return MpiWork(output_lists)

    @_call_of_torch("all_gather_single")
    def all_gather_single(self, output: Any, value: Any, opts: Any = None) -> MpiWork:
        """Copy the tensors of all ranks to one tensor of all ranks."""
        count = value.numel()
        with self._written("all_gather_into_tensor", opts, output) as rows:
            counts = [count] * self._size
            self._gather("all_gather_into_tensor", value, rows.reshape(-1), counts, opts, elements=count)
        return MpiWork(output)

    _allgather_base = all_gather_single

    @_call_of_torch("all_gather_single_coalesced")
    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        """Copy several tensors of all ranks to one tensor each."""
        for output, one in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, one, opts)
        return MpiWork(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_call_of_torch("gather")
    def gather(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> MpiWork:
        """Copy the tensors of all ranks to a list of one rank."""
        root, own = opts.rootRank, inputs[0]
        sent = [own if rank == root else None for rank in range(self._size)]
        received = list(outputs[0]) if self._rank == root else [None] * self._size
        self._exchange("gather", sent, received, opts, own, dtype=own.dtype, shape=tuple(own.shape), dst=root)
        return MpiWork(outputs)

    @_call_of_torch("scatter")
    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> MpiWork:
        """Copy the tensors of a list of one rank to all ranks."""
        root, own = opts.rootRank, outputs[0]
        sent = list(inputs[0]) if self._rank == root else [None] * self._size
        received = [own if rank == root else None for rank in range(self._size)]
        self._exchange("scatter", sent, received, opts, own, dtype=own.dtype, shape=tuple(own.shape), src=root)
        return MpiWork(outputs)

    @_call_of_torch("all_to_all")
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        """Copy a tensor of each rank to each rank."""
        self._exchange("all_to_all", list(inputs), list(outputs), opts, splits=_GIVEN, dtype=inputs[0].dtype)
        return MpiWork(outputs)

    @_call_of_torch("all_to_all_single")
    def all_to_all_single(
        self, output: Any, value: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> MpiWork:
        """Copy a part of each rank's tensor to each rank, cut along the first axis."""
        call, are_given = "all_to_all_single", bool(output_splits or input_splits)
        splits = _GIVEN if are_given or value.numel() != output.numel() else f"none of {value.numel()}"
        with self._written(call, opts, output) as rows:
            with self._refusing(call, opts):
                sent, received = self._cut(_in_rows(value), input_splits), self._cut(rows, output_splits)
                if value.dtype != output.dtype:
                    raise TypeError(f"the input is {value.dtype}, and the output {output.dtype}")
            self._exchange(call, sent, received, opts, splits=splits, dtype=value.dtype)
        return MpiWork(output)

    alltoall_base = all_to_all_single

    def _cut(self, tensor: Any, splits: Sequence[int] | None) -> list[Any]:
        length = tensor.shape[0] if tensor.dim() else 0
        if not splits and length % self._size:
            raise ValueError(f"the first axis has {length} elements, which {self._size} ranks do not divide")
        return list(tensor.split(list(splits) if splits else [length // self._size] * self._size))

    def _exchange(
        self,
        call: str,
        sent: list[Any],
        received: list[Any],
        opts: Any,
        like: Any = None,
        splits: str = "",
        **fields: Any,
    ) -> None:
        """Send a tensor to each rank, and receive one of each; `None` is no tensor. Collective.

        Fields, tensors that are `like` one, and `splits` say what each rank sends to each. Where splits are given, or
        differ, they do not, and ranks compare that, too.
        """
        none = torch.empty(0, dtype=torch.uint8)
        with self._refusing(call, opts):
            if not len(sent) == len(received) == self._size:
                raise ValueError(f"{len(sent)} tensors to send, and {len(received)} to receive, of {self._size} ranks")
            for one in () if like is None else (*sent, *received):
                if one is not None and (one.dtype, one.shape) != (like.dtype, like.shape):
                    raise ValueError(f"a tensor is {one.dtype}{[*one.shape]}, not {like.dtype}{[*like.shape]}")
            targets = [none if one is None else _in_rows(one) for one in received]
            incoming = [*map(_bytes_of, targets)]
            outgoing = [_bytes_of(none if one is None else _in_rows(one)) for one in sent]
        with self._call(call, opts, variant=fingerprint_of(splits) | 1, **fields) as are_alike:
            if splits == _GIVEN or not are_alike:
                self._messages.compare_sizes(call, outgoing, incoming)
            own, room = outgoing[self._rank], incoming[self._rank]
            if memory_bounds(own) == memory_bounds(room):  # in place: nothing is copied
                outgoing[self._rank] = room
            self._messages.all_to_all(copy_overwritten(outgoing, incoming), incoming)
        for one, rows in zip(received, targets, strict=True):
            if one is not None and rows.data_ptr() != one.data_ptr():
                one.detach().copy_(rows)

    @_call_of_torch("barrier")
    def barrier(self, opts: Any = None) -> MpiWork:
        """Wait for all ranks."""
        with self._call("barrier", opts):
            pass
        return MpiWork([])

    # Messages: no calls of all ranks, but a rank that waits for one watches the others.

    def _work_of(self, message: Message, tensors: Sequence[Any], rows: Any = None) -> MpiWork:
        """Return the work of a message that was started; `rows` are what it is received into."""

        def finish() -> None:
            message.wait(self._seconds)
            if rows is not None and rows.data_ptr() != tensors[0].data_ptr():
                tensors[0].detach().copy_(rows)

        return MpiWork(tensors, finish, message.is_over, lambda: message.source)

    @_call_of_torch("send")
    def send(self, tensors: Sequence[Any], destination: int, tag: int = 0) -> MpiWork:
        """Start to send a tensor to a rank."""
        name = f"send to rank {destination}, tag {tag},"
        return self._work_of(self._messages.send(name, _bytes_of(_in_rows(tensors[0])), destination, tag), tensors)

    @_call_of_torch("recv")
    def recv(self, tensors: Sequence[Any], source: int | None, tag: int = 0) -> MpiWork:
        """Start to receive a tensor from a rank; `None` is any rank."""
        rows = _in_rows(tensors[0])
        name = f"recv from {'any rank' if source is None else f'rank {source}'}, tag {tag},"
        return self._work_of(self._messages.receive(name, _bytes_of(rows), source, tag), tensors, rows)

    @_call_of_torch("recv")
    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> MpiWork:
        """Start to receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    def all_reduce_list(self, call: str, reduce_op: str, tensors: list[Any]) -> None:
        """Reduce a list of tensors in place, in one call. `call`: as the user wrote it."""
        self._ops.all_reduce(reduce_op, tensors, self._options_of(None), out=tensors, call=call)

    def all_reduce_sparse_list(self, call: str, reduce_op: str, tensors: Sequence[Any], opts: Any = None) -> None:
        """Reduce a list of sparse tensors in place, in one call. `call`: as the user wrote it."""
        with self._refusing(call, opts):
            rows = list(map(slices_of, tensors))
        results = self._ops.all_reduce(reduce_op, rows, self._options_of(opts), call=call)
        for tensor, its in zip(tensors, results, strict=True):
            write_slices(tensor, its)

    def broadcast_list(self, call: str, tensors: list[Any], root: int) -> None:
        """Copy one rank's tensors to all ranks, in one call. `call`: as the user wrote it."""
        self._ops.broadcast(tensors, "all", root=root, out=tensors, call=call)
