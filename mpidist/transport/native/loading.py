"""Loads the compiled part, where there is one."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

__all__ = ["native"]


def _load() -> Any:
    """Return the compiled module; `None` if there is none, or the environment disables it."""
    if os.environ.get("MPIDIST_NATIVE", "").strip() == "0":
        return None
    try:
        return import_module(f"{__package__}._native")
    except ImportError:
        return None


native: Final = _load()
