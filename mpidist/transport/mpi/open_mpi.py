"""The eager limit of Open MPI over TCP: the size up to which messages are sent at once, read from the library.

Longer messages cross TCP by a rendezvous, Open MPI's PUT protocol: the sender announces a message, and sends none of it
until the receiver has requested it. Both the announcement and the request wait behind all data that is on its way
already, and where data flow both ways, a link stands still for a part of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mpidist.transport.mpi.library import load_mpi

__all__ = ["eager_limit_bytes"]

_LIBRARY: Final = "Open MPI"
_OB1: Final = "pml_ob1_priority"  # exists only where ob1 carries the messages, and not UCX or libfabric
_EAGER_LIMIT: Final = "btl_tcp_eager_limit"
_HEADER_BYTES: Final = 256  # the limit counts the header, which is shorter
_LEAST_BYTES: Final = 16 << 10  # many shorter messages cost more than a rendezvous


def eager_limit_bytes() -> int | None:
    """Return the size of the longest message that Open MPI sends over TCP at once; `None` elsewhere. Local."""
    mpi = load_mpi()
    if mpi.get_vendor()[0] != _LIBRARY:
        return None
    try:
        library = ctypes.CDLL(mpi.__file__)
        with _variables(library):
            limit = None if _read(library, _OB1) is None else _read(library, _EAGER_LIMIT)
    except (OSError, AttributeError, TypeError):  # the functions are hidden
        return None
    return None if limit is None else max(limit - _HEADER_BYTES, _LEAST_BYTES)


@contextmanager
def _variables(library: ctypes.CDLL) -> Iterator[None]:
    """Start MPI's tool interface (MPI_T), which has the control variables, and end it.

    Requests the thread level that MPI has: Open MPI takes the level requested here as that of the whole process.
    """
    library.MPI_T_init_thread(load_mpi().Query_thread(), ctypes.byref(ctypes.c_int()))
    try:
        yield
    finally:
        library.MPI_T_finalize()


def _read(library: ctypes.CDLL, name: str) -> int | None:
    """Read a control variable of one number; `None` if it is not in use."""
    index, handle, count, value = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_size_t()
    if library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
        return None
    if library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)):
        return None
    try:
        return None if library.MPI_T_cvar_read(handle, ctypes.byref(value)) else value.value
    finally:
        library.MPI_T_cvar_handle_free(ctypes.byref(handle))
