"""NCCL's own texts of errors, which CuPy's binding lacks, from the library that CuPy has loaded."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from mpidist.transport.text import first_line

__all__ = ["error_text"]

_LIBRARY: Final = "libnccl.so.2"


def error_text(error: BaseException) -> str:
    """Return the text of an error of CuPy's binding, in one line, with NCCL's last warning in this process."""
    is_unknown = isinstance(error, KeyError)  # CuPy has no word for NCCL's newer statuses: 7 in progress, 8 timeout
    text, warning = f"NCCL's status {error}" if is_unknown else first_line(error), _last_warning()
    return f"{text}; NCCL's last warning here: {warning}" if warning else text


def _last_warning() -> str:
    """Return the text that NCCL keeps of its last warning, also without NCCL_DEBUG; nothing if there was none."""
    try:
        library = ctypes.CDLL(_LIBRARY, os.RTLD_NOW | os.RTLD_NOLOAD)  # CuPy's, and never a second one
        get_last_error = library.ncclGetLastError
    except (OSError, AttributeError):  # under another name, or of another maker
        return ""
    get_last_error.argtypes, get_last_error.restype = [ctypes.c_void_p], ctypes.c_char_p
    kept: bytes = get_last_error(None) or b""  # one text for all communicators
    return " ".join(kept.decode(errors="replace").split()).rstrip(".")
