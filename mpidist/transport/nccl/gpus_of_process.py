"""The GPUs that one process drives: each with an NCCL communicator, so that they add and copy without the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport import cuda
from mpidist.transport.arrays import address_of
from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.gpu.events import is_complete, new_event, new_stream, on_stream
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.handles import Handle, translated
from mpidist.transport.text import first_line
from mpidist.transport.tree import Fold
from mpidist.transport.waiting import Patience, never_free, poll

__all__ = ["GpusOfProcess"]

_ADVICE: Final = "NCCL_P2P_DISABLE=1 does without copies between GPUs, MPIDIST_NCCL=0 without NCCL"


@final
class _Gpu(NamedTuple):
    handle: Handle
    stream: Any  # NCCL's stream on this GPU, which also carries the kernels around NCCL's work
    mark: Any  # the event of what a caller's stream holds, and then of the end of the work
    kernels: DeviceKernels  # packs arrays

    @contextmanager
    def current(self) -> Iterator[Any]:
        """Make the GPU and its stream current for the body, and yield the caller's stream there."""
        with cuda.cupy().cuda.Device(self.handle.device), on_stream(self.stream) as callers:
            yield callers


@final
class GpusOfProcess:
    """The GPUs of one process, with an NCCL communicator for each. No other process takes part in anything here.

    NCCL moves bytes, and adds nothing: each GPU receives all parts of its shard, and a kernel adds them in the order of
    a tree. Work comes after what the current streams of the GPUs hold, and the host waits for its end.

    To add arrays of S bytes of k GPUs moves (k - 1) S bytes to the shards, and (k - 1) / k S bytes for each row to the
    first GPU. To broadcast them moves (k - 1) S bytes. After a failure, such as `DeadlineExceededError`, the
    communicators are aborted. The first one of the GPUs is the current device, before and after each call.

    Raises:
        UnavailableError: If NCCL cannot start.
    """

    def __init__(self, indices: Sequence[int], patience: Patience) -> None:
        self._patience = patience
        self._byte = int(cuda.nccl().NCCL_UINT8)
        self._gpus: list[_Gpu] = []
        for handle in self._connect(indices):
            with cuda.cupy().cuda.Device(handle.device):
                self._gpus.append(_Gpu(handle, new_stream(), new_event(), DeviceKernels()))

    def add(self, fold: Fold, ufunc: np.ufunc, parts: Sequence[Sequence[Array]], rows: Sequence[Array]) -> None:
        """Add parts [GPUs][arrays] in the order of a tree, to flat rows on the first GPU, of the dtype of the sums."""
        count, dtype = rows[0].size, rows[0].dtype
        if not count:
            return
        with self._launches("a sum", (parts, rows)):
            bounds = shard_bounds(count, len(self._gpus))
            buffers = [self._flat(at, own, dtype) for at, own in enumerate(parts)]
            received, shards = self._scatter(buffers, bounds), []
            for at, (start, stop) in enumerate(pairwise(bounds)):
                with self._gpus[at].current():
                    own = self._empty(fold.num_rows, stop - start, dtype) if at else [row[:stop] for row in rows]
                    if stop > start:
                        fold.combine(ufunc, received[at], own)
                shards.append(own)
            self._collect(shards, rows, bounds)

    def compile(self, fold: Fold, ufunc: np.ufunc, read: np.dtype[Any], number: int, dtype: np.dtype[Any]) -> None:
        """Compile what `add` needs on each GPU, for up to `number` arrays of dtype `read` that are added in `dtype`."""
        for gpu in self._gpus:
            with gpu.current():
                for count in {1, number}:  # long lists have kernels of their own
                    gpu.kernels.pack(self._empty(count, 1, read), self._empty(1, count, dtype)[0])
                fold.combine(ufunc, self._empty(fold.num_parts, 1, dtype), self._empty(fold.num_rows, 1, dtype))

    def broadcast(self, sources: Sequence[Array], targets: Sequence[Sequence[Array]]) -> None:
        """Copy contiguous arrays of the first GPU to those of the others [other GPUs][arrays], of the same sizes."""
        everywhere = [sources, *targets]
        with self._launches("a broadcast", everywhere), nccl_handles.group_of_calls():
            for at, source in enumerate(sources):
                for gpu, arrays in zip(self._gpus, everywhere, strict=True):
                    if source.size:
                        gpu.handle.comm.bcast(address_of(arrays[at]), source.nbytes, self._byte, 0, gpu.stream.ptr)

    def free(self) -> None:
        """Destroy the communicators."""
        nccl_handles.destroy([gpu.handle for gpu in self._gpus])

    def _connect(self, indices: Sequence[int]) -> list[Handle]:
        """Make the communicators, all in one group, in a daemon thread, as NCCL may block for ever."""
        init = nccl_handles.start_init(len(indices), None, dict(enumerate(indices)))
        patience = Patience(timeout_seconds=nccl_handles.START_SECONDS)
        try:
            return init.wait(patience.watch("NCCL's start", "see the output of NCCL_DEBUG=WARN"))
        except BaseException as error:
            init.cancel()
            if not isinstance(error, Exception):
                raise
            raise UnavailableError(
                f"NCCL could not be started on GPUs {', '.join(map(str, indices))} of one process: "
                f"{first_line(error)}. NCCL_DEBUG=WARN prints more; MPIDIST_NCCL=0 disables NCCL"
            ) from error

    def _scatter(self, buffers: Sequence[Array], bounds: Sequence[int]) -> list[list[Array]]:
        """Send each GPU its shard of each buffer: [GPUs][parts of its shard]."""
        width, received = buffers[0].itemsize, []
        for at, (start, stop) in enumerate(pairwise(bounds)):
            with self._gpus[at].current():
                parts = self._empty(len(self._gpus), stop - start, buffers[at].dtype)
            parts[at] = buffers[at][start:stop]
            received.append(parts)
        with nccl_handles.group_of_calls():
            for at, buffer in enumerate(buffers):
                for peer in (peer for peer in range(len(self._gpus)) if peer != at):
                    self._send(at, address_of(buffer) + bounds[peer] * width, peer, received[peer][at])
        return received

    def _collect(self, shards: Sequence[Sequence[Array]], rows: Sequence[Array], bounds: Sequence[int]) -> None:
        """Send the shards of the rows to the first GPU."""
        with nccl_handles.group_of_calls():
            for at in range(1, len(self._gpus)):
                for shard, row in zip(shards[at], rows, strict=True):
                    self._send(at, address_of(shard), 0, row[bounds[at] : bounds[at + 1]])

    def _send(self, at: int, address: int, peer: int, into: Array) -> None:
        """Send bytes from an address of one GPU to an array of another one."""
        if into.nbytes:
            sender, receiver = self._gpus[at], self._gpus[peer]
            sender.handle.comm.send(address, into.nbytes, self._byte, peer, sender.stream.ptr)
            receiver.handle.comm.recv(address_of(into), into.nbytes, self._byte, at, receiver.stream.ptr)

    def _flat(self, at: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
        """Return arrays of a GPU one after the other: a single one without a copy where possible."""
        if len(arrays) == 1 and arrays[0].dtype == dtype and arrays[0].flags.c_contiguous:
            return arrays[0].reshape(-1)
        with self._gpus[at].current():
            buffer = cuda.cupy().empty(sum(array.size for array in arrays), dtype)
            self._gpus[at].kernels.pack(list(arrays), buffer)
        return buffer

    def _empty(self, number: int, count: int, dtype: np.dtype[Any]) -> list[Array]:
        return [cuda.cupy().empty(count, dtype) for _ in range(number)]

    @contextmanager
    def _launches(self, what: str, memory: Any) -> Iterator[None]:
        """Launch the work of the body after the current streams, and wait for it.

        Keeps `memory`, if it fails. CuPy keeps memory of a GPU's stream until the work there is done.
        """
        names = ", ".join(str(gpu.handle.device) for gpu in self._gpus)
        text = f"{what} over GPUs {names} of one process"
        self._require_usable(text)
        try:
            with translated(text):
                for gpu in self._gpus:
                    with gpu.current() as callers:
                        gpu.mark.record(callers)
                        gpu.stream.wait_event(gpu.mark)
                yield
                self._wait(text)
        except BaseException as error:
            nccl_handles.abort_all(error)
            never_free((self, memory))
            raise

    def _wait(self, what: str) -> None:
        for gpu in self._gpus:
            with gpu.current():
                gpu.mark.record(gpu.stream)
        check_time = self._patience.watch(what, _ADVICE)

        def check() -> None:
            for gpu in self._gpus:
                gpu.handle.check()
            check_time()

        poll(lambda: all(is_complete(gpu.mark, what, "with NCCL") for gpu in self._gpus), check, is_message=False)
        self._require_usable(what)  # an abort ends work, too

    def _require_usable(self, what: str) -> None:
        for gpu in self._gpus:
            gpu.handle.require_usable(what)
