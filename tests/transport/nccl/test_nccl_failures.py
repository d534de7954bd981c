"""The NCCL transport, where a rank, NCCL or a call of it fails: errors, aborts, and what begins anew."""

import _thread
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from host_cuda.emulated import HANGS, Emulated
from host_cuda.gpus import connected, emulated, gpus, is_working, opened, up
from support.everywhere import raises_everywhere
from support.ranks import Intracomm
from transport.nccl.made_communicators import connect, make_handle

from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.transport import cuda
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.reduction import Reduction

__all__ = ["connected", "emulated", "gpus"]  # fixtures

pytestmark = pytest.mark.ranks(3)

_HAS_RAISED: Final = 21  # a tag


@pytest.mark.parametrize(("kind", "is_connected"), [(DeadlineExceededError, True), (KeyboardInterrupt, False)])
def test_what_a_rank_raises_while_it_waits_ends_in_one_abort(
    emulated: Emulated, comm: Intracomm, kind: Any, is_connected: bool
) -> None:
    """All communicators of the process go together, the error comes in time, and later calls name it.

    No other array gets the memory.
    """
    first, second = connect(cuda.current(), comm), connect(cuda.current(), comm, "second")
    if is_connected:
        first.reduce_scatter(up(np.ones(comm.size, np.float16)), Reduction())
        comm.Barrier()
    start, buffer, into = time.monotonic(), up(np.ones(comm.size, np.float16)), up(np.ones(1, np.float16))
    kept = weakref.ref(buffer), weakref.ref(into)

    def give_up() -> None:
        if time.monotonic() - start > 0.4:
            raise kind("rank 1 did not come")

    first.set_wait_hook(give_up)
    if comm.rank != 1:
        with pytest.raises(kind, match="rank 1 did not come"):
            first.reduce_scatter(buffer, Reduction(), into=into)
        assert emulated.ended() == [("abort", 2)]
        for its in (first, second):
            with pytest.raises(
                (RuntimeError, DeadlineExceededError), match=r"an earlier call failed .*rank 1 did not come.*reset"
            ):
                its.all_reduce(up(np.ones(5)), Reduction())
    else:
        nccl_handles.abort_all("the others gave up")
    nccl_handles.wait_for_endings()
    first.free()  # what is gone need not be destroyed
    second.free()
    assert emulated.ended() == [("abort", 2)]
    del first, second, buffer, into
    gc.collect()
    assert [its() is None for its in kept] == [comm.rank == 1] * 2, "a GPU that is busy may come to it later"


def test_an_abort_that_hangs_holds_nobody_up(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_handles, "LIMIT_SECONDS", 1.0)
    its = connect(cuda.current(), comm)
    emulated.wish("abort", HANGS)
    nccl_handles.abort_all("of a test")
    assert not caplog.text, "nobody has waited for its end"
    nccl_handles.wait_for_endings()
    assert "did not end within" in caplog.text
    its.free()
    emulated.be_normal()


def test_who_frees_a_communicator_waits_until_it_is_gone(emulated: Emulated, comm: Intracomm) -> None:
    its = connect(cuda.current(), comm)
    emulated.wish("destroy", HANGS)
    threading.Timer(0.5, emulated.be_normal).start()
    its.free()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mpidist the end")]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_start_of_nccl_that_is_given_up_and_what_it_makes_later_is_aborted(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """By an interrupt on rank 0, or as it takes too long."""
    if comm.rank == 1:
        emulated.wish("ncclCommInitRank", HANGS)
    kind: Any = UnavailableError
    for group in opened(comm):
        if is_interrupted:
            kind = KeyboardInterrupt if comm.rank == 0 else PeerFailedError
            if comm.rank == 0:
                threading.Timer(0.5, _thread.interrupt_main).start()
        with monkeypatch.context() as patch:
            patch.setattr(nccl_handles, "START_SECONDS", 600.0 if is_interrupted else 2.0)
            with pytest.raises(kind, match=None if is_interrupted else "ranks 0.*: it did not start within 2 s"):
                is_working(group)
        emulated.be_normal()
        emulated.wait_for_end()
        nccl_handles.wait_for_endings()
        assert emulated.ended() == [("abort", 1)]
        group.reset()
        assert is_working(group)


@pytest.mark.parametrize(
    ("call", "status", "kind", "text"),
    [
        ("an error of NCCL", 2, PeerFailedError, ": NCCL_ERROR.*NCCL_DEBUG"),
        ("an error of NCCL", 6, PeerFailedError, ": NCCL_ERROR.*NCCL_DEBUG"),
        ("an error of NCCL", 3, UnavailableError, ": NCCL_ERROR.*NCCL_DEBUG"),
        ("ncclGroupEnd", 7, UnavailableError, "'s status 7; unset NCCL_COMM_BLOCKING"),  # for which CuPy has no word
        ("ncclGroupEnd", 8, DeadlineExceededError, "'s status 8; unset NCCL_COMM_BLOCKING"),
    ],
)
def test_errors_of_nccl_become_ours(
    emulated: Emulated, comm: Intracomm, call: str, status: int, kind: type[Exception], text: str
) -> None:
    its = connect(cuda.current(), comm)
    if comm.rank == 0:
        emulated.wish(call, status)
        with pytest.raises(kind, match=rf"all_reduce with NCCL on rank 0 of \d \(all\) failed.*{text}"):
            its.all_reduce(up(np.ones(5)), Reduction())
        emulated.be_normal()
    nccl_handles.abort_all("of a test")
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 1)] or call == "ncclGroupEnd", "which also ends the group of aborts"


@pytest.mark.parametrize("what", ["ncclGetUniqueId", "ncclCommInitRank"])
def test_what_fails_on_one_rank_fails_on_all_and_can_be_tried_again(
    emulated: Emulated, comm: Intracomm, what: str
) -> None:
    failing = 0 if what == "ncclGetUniqueId" else comm.size - 1
    if comm.rank == failing:
        emulated.wish(what, 2)
    pattern = rf"could not be started \(within_node\): rank {failing}: NCCL_ERROR"
    for group in opened(comm):
        with raises_everywhere(comm, UnavailableError, pattern):
            is_working(group)
        emulated.be_normal()
        assert is_working(group)


def test_nobody_looks_for_errors_of_a_communicator_that_is_being_aborted(emulated: Emulated, comm: Intracomm) -> None:
    """Another thread aborts all communicators of a process: the look reads memory that the abort frees."""
    handle, order = make_handle(cuda.current(), comm), []
    real, look = handle.comm, handle.comm.check_async_error

    def slow_look() -> None:
        other = threading.Thread(target=lambda: (nccl_handles.abort_all("of a test"), order.append("aborted")))
        other.start()
        other.join(0.2)
        order.append("looked")
        threads.append(other)
        look()

    threads: list[threading.Thread] = []
    handle.comm = SimpleNamespace(check_async_error=slow_look, abort=real.abort)
    handle.check()
    threads[0].join()
    handle.check()
    nccl_handles.wait_for_endings()
    assert order == ["looked", "aborted"]
    assert emulated.ended() == [("abort", 1)]


def test_a_constructor_that_was_given_up_is_aborted_when_it_returns(emulated: Emulated, comm: Intracomm) -> None:
    unique_id = comm.bcast(cuda.current().nccl.get_unique_id() if comm.rank == 0 else None)
    if comm.rank == 0:
        making = nccl_handles.start_init(comm.size, unique_id, {0: 0})
        time.sleep(0.1)
        assert making.outcome() == (False, "")
        making.cancel()
    comm.Barrier()
    if comm.rank:
        making = nccl_handles.start_init(comm.size, unique_id, {comm.rank: 0})
        while not making.outcome()[0]:
            time.sleep(0.01)
        making.cancel()
    emulated.wait_for_end()
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 1)]
