"""The process group `mpidist` of torch.distributed: torch's calls, in torch's forms, on tensors in host memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from math import prod
from typing import Any, Final, TypeVar, final
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.autograd import profiler

from mpidist import nest
from mpidist.collectives.compared_copies import GIVEN, ComparedCopies
from mpidist.collectives.open_call import PendingResult
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.errors import DeadlineExceededError
from mpidist.options import CommunicationOptions
from mpidist.torch.nccl import has_cuda_tensors, make_nccl_group, takes_cuda
from mpidist.torch.rendezvous import check_numbers
from mpidist.torch.work import MpiWork, long_form, untraced
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.group.messages import Message
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.shared_errors import following_of
from mpidist.transport.waiting import is_pausing
from mpidist.values import IndexedSlices

__all__ = ["MpiProcessGroup", "bytes_of_tensor", "sparse_tensor"]

logger = logging.getLogger("mpidist.torch")

_REDUCE_OPS: Final = {"SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_OF_BITS: Final = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
_OF_BOOLS: Final = {"SUM": "max", "PRODUCT": "min", "MIN": "min", "MAX": "max"}  # sum: or; product: and
_REMEDY: Final = "The group is unusable until destroy_process_group() and init_process_group() are called on all ranks"
_NO_BYTES: Final = np.empty(0, np.uint8)
sparse_tensor: Final = partial(torch.sparse_coo_tensor, check_invariants=False)  # else torch warns

_Method = Callable[..., MpiWork]
_T = TypeVar("_T")


def _group_of(options: Any) -> SyncGroup:
    """Make the group of the ranks given by torch. Collective over them."""
    world = load_mpi().COMM_WORLD
    if not options.global_ranks_in_group:
        check_numbers(options.group_rank, options.group_size)
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    tag = fingerprint_of(str(options.group_id)) % 20000
    comm = world.Create_group(world.group.Incl(ranks), tag)
    try:
        return SyncGroup.from_mpi(comm)
    finally:
        comm.Free()


def bytes_of_tensor(tensor: Any) -> Any:
    """Return the bytes of a tensor in row-major order, flat: a view, if it is in that order."""
    return _bytes_of(_in_rows(tensor))


def _bytes_of(rows: Any) -> Any:
    """View the memory of a tensor that `_in_rows` returned as bytes, flat; of none, no bytes."""
    if rows is None:
        return _NO_BYTES
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy()  # the stride of a length of 1 may be any


def _in_rows(tensor: Any) -> Any:
    """Return a tensor of the same numbers in row-major order: of the same memory, if that is so."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor is {tensor.layout} on {tensor.device}, and a dense one in host memory is needed")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _call_of_torch(name: str, starts_itself: bool = False) -> Callable[[_Method], _Method]:
    """Make a method a call of torch: NCCL takes CUDA tensors, torch's profiler shows it, `async_op=True` starts it."""

    def decorated(method: _Method) -> _Method:
        @wraps(method)
        def shown(group: MpiProcessGroup, *arguments: Any, **options: Any) -> MpiWork:
            usual, named = long_form(method.__name__, arguments, options)
            run, given = partial(method, group, *usual, **named), (*usual, *named.values())
            if any(map(has_cuda_tensors, arguments)):
                of_nccl = getattr(group.told(name, group._nccl_group, given), method.__name__)
                return of_nccl(*arguments, **options)  # type: ignore[no-any-return]
            with profiler.record_function(f"mpidist:{name}") if profiler._is_profiler_enabled else nullcontext():
                return group.told(name, run, given) if starts_itself else group._start(name, run, given)

        return untraced(shown)

    return decorated


def _call_of_several(name: str, call: _Method) -> _Method:
    """Make of a call of an output and an input a call of lists of them."""

    def calls(group: MpiProcessGroup, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        for output, one in [*zip(outputs, inputs, strict=True)]:  # refuses other lengths before the first call
            call(group, output, one, opts)
        return MpiWork(outputs)

    calls.__name__ = f"{call.__name__}_coalesced"
    return _call_of_torch(name)(calls)


def _slices_of(tensor: Any) -> IndexedSlices:
    """Return the rows of a sparse tensor, whose sparse axes are counted as one. They may repeat."""
    shape = tensor.shape[: tensor.sparse_dim()]
    rows = np.ravel_multi_index(tuple(tensor._indices().numpy()), shape)
    return IndexedSlices(tensor._values().detach(), rows, (prod(shape), *tensor.shape[tensor.sparse_dim() :]))


@contextmanager
def _written(tensor: Any) -> Iterator[Any]:
    """Give a tensor in row-major order to write to; values written there are in the tensor afterwards."""
    rows = _in_rows(tensor)
    yield rows
    if rows.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(rows)


def _name_of(opts: Any) -> str:
    op = getattr(opts, "reduceOp", None)
    kind = getattr(op, "op", op) or dist.ReduceOp.SUM
    names = (name for name in (*_REDUCE_OPS, *_OF_BITS) if int(getattr(dist.ReduceOp, name)) == int(kind))
    return next(names, str(kind))


def _real_views(tensors: Sequence[Any], name: str) -> tuple[list[Any], str]:
    """Return views of dtypes that are reduced, and the reduction's name for them."""
    tensors = [tensor.detach() for tensor in tensors]
    kinds = {tensor.dtype for tensor in tensors}
    if torch.bool in kinds:
        if len(kinds) > 1 or name not in _OF_BOOLS:
            raise ValueError(f"reduce_op {name} of tensors of {kinds}: bool tensors have {', '.join(_OF_BOOLS)}")
        return [tensor.view(torch.uint8) for tensor in tensors], _OF_BOOLS[name]
    if name == "AVG" and _are_integers(tensors):
        raise ValueError("reduce_op AVG of integers: only all_reduce has it; use SUM, and divide the result")
    if name not in _REDUCE_OPS:
        raise ValueError(f"reduce_op {name} is not supported here; there are {', '.join(_REDUCE_OPS)}")
    if any(tensor.is_complex() for tensor in tensors):
        if name not in ("SUM", "AVG"):
            raise ValueError(f"reduce_op {name} of complex tensors: they have SUM and AVG")
        tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return tensors, _REDUCE_OPS[name]


def _are_integers(tensors: Sequence[Any]) -> bool:
    return not any(one.is_floating_point() or one.is_complex() or one.dtype == torch.bool for one in tensors)


def _wait_and_divide(pending: PendingResult, sums: Sequence[Any], size: int) -> None:
    """Wait for sums of integers, and divide them by the number of ranks, rounding towards 0 as NCCL does."""
    pending.wait()
    divisor = np.min_scalar_type(size).type(size)  # a Python int must fit into the dtype of the sums
    for numbers in (one.numpy() for one in sums):
        numbers -= np.fmod(numbers, divisor)
        numbers //= divisor


@final
class MpiProcessGroup(ProcessGroup):
    """Ranks that make torch's calls together. Each call is compared on all ranks before data moves, and watched.

    What a call does, torch documents. What is wrong with one rank's arguments, all ranks raise. Making a group, of the
    `options` that torch has of it, is collective over its ranks alone; `ops` are its reductions.
    """

    supports_splitting = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._store, self._name, self._seconds = options.store, str(options.group_id), options.timeout.total_seconds()
        self._group = _group_of(options)
        if (watchdog := self._group.watch()) is not None:
            watchdog.remedy = _REMEDY
        several = self._group.topology.num_nodes > 1
        self.ops = BoundOps(HierarchicalCopyAllReduce() if several else CollectiveAllReduce(), self._group)
        self._copies = ComparedCopies(self._group)
        self.compared: WeakSet[Any] = WeakSet()  # modules whose parameters the ranks have found equal
        self._nccl: ProcessGroup | None = None

    # What torch asks a group.

    def getBackendName(self) -> str:
        return "mpidist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> Any:
        has_nccl = torch.device(device).type == "cuda" and takes_cuda(self)
        return self._nccl_group()._get_backend(device) if has_nccl else self

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), *([torch.device("cuda")] if takes_cuda(self) else [])]

    def _nccl_group(self) -> ProcessGroup:
        """Return the group of CUDA tensors, made at the first of them."""
        if self._nccl is None:
            self._nccl = make_nccl_group(self, self._store, timedelta(seconds=self._seconds))
        return self._nccl

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.agreement.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        if self._nccl is not None:
            self._nccl.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Collective; returns at once after an error, which is reported to the other ranks."""
        error = sys.exc_info()[1]
        if self._nccl is not None:
            self._nccl.shutdown() if error is None else self._nccl.abort()
        if error is None:
            self._copies.messages.free()
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

    def _root_of(self, opts: Any) -> int:
        """Return the root of a call; raises if it is no rank of the group."""
        if not 0 <= opts.rootRank < self._size:
            raise ValueError(f"the root is rank {opts.rootRank}, and the ranks are 0 to {self._size - 1}")
        return int(opts.rootRank)

    def options_of(self, opts: Any = None) -> CommunicationOptions:
        """Return the options of a call of `ops`: the timeout of torch's, or of the group."""
        return CommunicationOptions(timeout_seconds=self._seconds_of(opts))

    def compare(self, name: str, **fields: Any) -> None:
        """Raise on all ranks if their fields of a call differ. Collective."""
        with self._copies.call(name, self._seconds, **fields):
            pass

    def told(self, name: str, run: Callable[[], _T], given: Sequence[Any]) -> _T:
        """Make a call; all ranks raise the error of this rank's arguments, but for messages of two ranks."""
        if name in ("send", "recv"):
            return run()
        return self._copies.tell(name, self._seconds_of(given[-1] if given else None), run)

    def _start(self, name: str, run: Callable[[], MpiWork], given: Sequence[Any]) -> MpiWork:
        """Make a call; if its last argument is asynchronous options, the call is only started."""
        told = partial(self.told, name, run, given)
        if is_pausing() or not getattr(given[-1] if given else None, "asyncOp", False):
            return told()
        result = given[0] if len(given) > 1 else []
        pending = PendingResult(self._group, self._group.calls.start_function(told), None, result, {})
        return MpiWork(result, pending.wait, pending.is_done)

    # Reductions.

    @_call_of_torch("all_reduce", starts_itself=True)
    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        """Reduce tensors in place. Always started, so that a rank may wait at once where another one does later."""
        name = _name_of(opts)
        if name in _OF_BITS or any(one.is_sparse for one in tensors):
            call = f"all_reduce {name}" if name in _OF_BITS else "all_reduce"
            run = self._all_reduce_bits if name in _OF_BITS else self._all_reduce_sparse
            return self._start(call, partial(run, call, tensors, name, opts), (tensors, opts))
        call = "all_reduce"
        if has_quotients := name == "AVG" and _are_integers(tensors):
            name, call = "SUM", "all_reduce AVG of integers"
        values, reduce_op = _real_views(tensors, name)
        pending = self.ops.start_all_reduce(reduce_op, values, self.options_of(opts), out=values, call=call)
        finish = partial(_wait_and_divide, pending, values, self._size) if has_quotients else pending.wait
        work = MpiWork(tensors, finish, pending.is_done)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    @_call_of_torch("all_reduce_coalesced", starts_itself=True)
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        return self.allreduce(tensors, opts)

    def _all_reduce_sparse(self, call: str, tensors: Sequence[Any], name: str, opts: Any) -> MpiWork:
        if name == "AVG" and not all(one.is_floating_point() or one.is_complex() for one in tensors):
            raise ValueError("reduce_op AVG of sparse tensors of integers, which have no mean")
        if not all(one.is_sparse for one in tensors):
            raise ValueError("some of the tensors are sparse, and others not: reduce them in two calls")
        self.reduce_sparse(_REDUCE_OPS.get(name, name), tensors, opts, call)
        return MpiWork(tensors)

    def reduce_sparse(self, reduce_op: str, tensors: Any, opts: Any, call: str) -> None:
        """Reduce a nest of sparse tensors in place, in one call. Collective. `call`: as the user wrote it."""
        rows = self.told(call, lambda: nest.map_structure(_slices_of, tensors), (opts,))
        results = self.ops.all_reduce(reduce_op, rows, self.options_of(opts), call=call)
        for tensor, its in zip(nest.flatten(tensors)[0], nest.flatten(results)[0], strict=True):
            places = np.stack(np.unravel_index(its.indices, tensor.shape[: tensor.sparse_dim()]))
            with torch.no_grad():
                tensor.copy_(sparse_tensor(torch.from_numpy(places), its.values, tensor.shape))

    def _all_reduce_bits(self, call: str, tensors: Sequence[Any], name: str, opts: Any) -> MpiWork:
        if wrong := [one.dtype for one in tensors if one.is_floating_point() or one.is_complex()]:
            raise ValueError(f"reduce_op {name} of a tensor of {wrong[0]}: needed integers or bools")
        for tensor in tensors:
            with _written(tensor) as rows:
                everyone = torch.empty(self._size, rows.numel(), dtype=rows.dtype)
                counts = [rows.numel()] * self._size
                self._gather(call, rows, everyone.reshape(-1), counts, opts, shape=tuple(rows.shape))
                _bytes_of(rows)[...] = _OF_BITS[name].reduce(everyone.view(torch.uint8).numpy(), axis=0)
        return MpiWork(tensors)

    @_call_of_torch("reduce")
    def reduce(self, tensors: Sequence[Any], opts: Any) -> MpiWork:
        (value,), reduce_op = _real_views(tensors, _name_of(opts))
        result = self.ops.reduce(reduce_op, value, opts.rootRank, self.options_of(opts))
        if self._rank == opts.rootRank:
            value.copy_(result)
        return MpiWork(tensors)

    @_call_of_torch("reduce_scatter")
    def reduce_scatter_single(self, output: Any, value: Any, opts: Any = None) -> MpiWork:
        if value.numel() != output.numel() * self._size:
            raise ValueError(f"input has {value.numel()} elements, not {self._size} times output's {output.numel()}")
        with _written(output) as rows:
            (source, target), reduce_op = _real_views([_in_rows(value).flatten(), rows.view(-1)], _name_of(opts))
            source, out = source.flatten(), target.view(-1)
            reduce_scatter(self._group, reduce_op, source, 0, self.ops.options, self.options_of(opts), out)
        return MpiWork(output)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _call_of_several(
        "reduce_scatter", reduce_scatter_single
    )

    @_call_of_torch("reduce_scatter")
    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        for output, parts in [*zip(outputs, inputs, strict=True)]:
            if len(parts) != self._size or parts[self._rank].numel() != output.numel():
                raise ValueError(f"parts of {[one.numel() for one in parts]} elements, and {output.numel()} of output")
            if all(part.numel() == output.numel() for part in parts):
                self.reduce_scatter_single(output, torch.cat([part.detach().reshape(-1) for part in parts]), opts)
                continue
            sums = [_in_rows(part).clone() for part in parts]
            values, reduce_op = _real_views(sums, _name_of(opts))
            self.ops.all_reduce(reduce_op, values, self.options_of(opts), out=values, call="reduce_scatter")
            output.detach().copy_(sums[self._rank].view(output.shape))
        return MpiWork(outputs)

    # Copies.

    @_call_of_torch("broadcast")
    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> MpiWork:
        root, seconds = 0 if opts is None else self._root_of(opts), self._seconds_of(opts)
        for tensor in tensors:
            with _written(tensor) as rows:
                fields = {"dtype": tensor.dtype, "shape": tuple(tensor.shape)}
                self._copies.broadcast("broadcast", _bytes_of(rows), root, seconds, **fields)
        return MpiWork(tensors)

    def _gather(self, call: str, own: Any, flat: Any, counts: Sequence[int], opts: Any, **fields: Any) -> None:
        """Copy the tensors of all ranks, of given lengths, into a flat one. Collective."""
        own = _in_rows(own)
        if own.dtype != flat.dtype:
            raise TypeError(f"the input is {own.dtype}, and the output {flat.dtype}")
        mine = counts[self._rank : self._rank + 1]
        if (len(counts), sum(counts), *mine) != (self._size, flat.numel(), own.numel()):
            raise ValueError(f"the input has {own.numel()} elements, the output {flat.numel()} of {counts} by rank")
        bounds = [flat.element_size() * sum(counts[:at]) for at in range(self._size + 1)]
        seconds = self._seconds_of(opts)
        self._copies.all_gather(call, _bytes_of(own), _bytes_of(flat), bounds, seconds, dtype=flat.dtype, **fields)

    @_call_of_torch("all_gather")
    def allgather(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        for outs, one in [*zip(outputs, inputs, strict=True)]:
            counts = [out.numel() for out in outs]
            flat = torch.empty(sum(counts), dtype=one.dtype)
            gather = partial(self._gather, "all_gather", one, flat, counts, opts, sizes=tuple(counts))
            self.told("all_gather", gather, (opts,))
            for out, part in zip(outs, flat.split(counts), strict=True):
                out.detach().copy_(part.view(out.shape))
        return MpiWork(outputs)

    @_call_of_torch("all_gather_coalesced")
    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        self.allgather([[one[at] for one in output_lists] for at in range(len(inputs))], inputs, opts)
        return MpiWork(output_lists)

    @_call_of_torch("all_gather_into_tensor")
    def all_gather_single(self, output: Any, value: Any, opts: Any = None) -> MpiWork:
        call, count = "all_gather_into_tensor", value.numel()
        with _written(output) as rows:
            self._gather(call, value, rows.reshape(-1), [count] * self._size, opts, elements=count)
        return MpiWork(output)

    _allgather_base = all_gather_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _call_of_several(
        "all_gather_into_tensor", all_gather_single
    )

    @_call_of_torch("gather")
    def gather(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> MpiWork:
        root, own = self._root_of(opts), inputs[0]
        sent = [own if rank == root else None for rank in range(self._size)]
        received = list(outputs[0]) if self._rank == root else [None] * self._size
        self._exchange("gather", sent, received, opts, own, dst=root)
        return MpiWork(outputs)

    @_call_of_torch("scatter")
    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> MpiWork:
        root, own = self._root_of(opts), outputs[0]
        sent = list(inputs[0]) if self._rank == root else [None] * self._size
        received = [own if rank == root else None for rank in range(self._size)]
        self._exchange("scatter", sent, received, opts, own, src=root)
        return MpiWork(outputs)

    @_call_of_torch("all_to_all")
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> MpiWork:
        self._exchange("all_to_all", list(inputs), list(outputs), opts, splits=GIVEN, dtype=inputs[0].dtype)
        return MpiWork(outputs)

    @_call_of_torch("all_to_all_single")
    def all_to_all_single(
        self, output: Any, value: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> MpiWork:
        are_given = output_splits or input_splits or value.numel() != output.numel()
        splits = GIVEN if are_given else f"none of {value.numel()}"
        if value.dtype != output.dtype:
            raise TypeError(f"the input is {value.dtype}, and the output {output.dtype}")
        with _written(output) as rows:
            sent, received = self._cut(_in_rows(value), input_splits), self._cut(rows, output_splits)
            self._exchange("all_to_all_single", sent, received, opts, splits=splits, dtype=value.dtype)
        return MpiWork(output)

    alltoall_base = all_to_all_single

    def _cut(self, tensor: Any, splits: Sequence[int] | None) -> list[Any]:
        length = tensor.shape[0] if tensor.dim() else 0
        if not splits and length % self._size:
            raise ValueError(f"the first axis has {length} elements, which {self._size} ranks do not divide")
        return list(tensor.split(list(splits) if splits else [length // self._size] * self._size))

    def _exchange(
        self, call: str, sent: list[Any], received: list[Any], opts: Any, like: Any = None, **fields: Any
    ) -> None:
        """Send a tensor to each rank, and receive one of each; `None` is no tensor. Collective.

        If tensors are to be `like` one, then that, and the fields, define the messages of all ranks; else `splits` do.
        """
        if like is not None:
            fields.update(dtype=like.dtype, shape=tuple(like.shape), splits="")
        if not len(sent) == len(received) == self._size:
            raise ValueError(f"{len(sent)} tensors to send, and {len(received)} to receive, of {self._size} ranks")
        for one in () if like is None else (*sent, *received):
            if one is not None and (one.dtype, one.shape) != (like.dtype, like.shape):
                raise ValueError(f"a tensor is {one.dtype}{[*one.shape]}, not {like.dtype}{[*like.shape]}")
        with ExitStack() as written:
            targets = [None if one is None else written.enter_context(_written(one)) for one in received]
            outgoing = [_bytes_of(None if one is None else _in_rows(one)) for one in sent]
            self._copies.exchange(call, outgoing, [*map(_bytes_of, targets)], self._seconds_of(opts), **fields)

    @_call_of_torch("barrier")
    def barrier(self, opts: Any = None) -> MpiWork:
        with self._copies.call("barrier", self._seconds_of(opts)):
            return MpiWork([])

    # Messages: no calls of all ranks, but a rank that waits for one watches the others.

    def _work_of(self, message: Message, tensors: Sequence[Any], written: ExitStack) -> MpiWork:
        """Return the work of a message that was started; a received one is `written` when it has come."""

        def finish() -> None:
            message.wait(self._seconds)
            written.close()

        return MpiWork(tensors, finish, message.is_over, lambda: message.source)

    @_call_of_torch("send")
    def send(self, tensors: Sequence[Any], destination: int, tag: int = 0) -> MpiWork:
        name = f"send to rank {destination}, tag {tag},"
        message = self._copies.messages.send(name, _bytes_of(_in_rows(tensors[0])), destination, tag)
        return self._work_of(message, tensors, ExitStack())

    @_call_of_torch("recv")
    def recv(self, tensors: Sequence[Any], source: int | None, tag: int = 0) -> MpiWork:
        written = ExitStack()
        rows = _bytes_of(written.enter_context(_written(tensors[0])))
        name = f"recv from {'any rank' if source is None else f'rank {source}'}, tag {tag},"
        return self._work_of(self._copies.messages.receive(name, rows, source, tag), tensors, written)

    @_call_of_torch("recv")
    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> MpiWork:
        return self.recv(tensors, None, tag)
