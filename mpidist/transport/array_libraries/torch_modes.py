"""Modes of PyTorch that belong to a thread: of replicas that take turns on one thread, each has its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

__all__ = ["change_modes", "current_modes"]

_DEVICES: Final = ("cpu", "cuda")
_NO_CHANGE: Final = nullcontext()


def current_modes() -> tuple[Any, ...] | None:
    """Return what `torch.no_grad`, `inference_mode` and `autocast` set on this thread; `None` without PyTorch 2.4."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_autocast_dtype"):
        return None
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(), autocast


def change_modes(current: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> AbstractContextManager[None]:
    """Replace the current modes by others in a `with` body. Local."""
    if current is not None and new is None:  # of before PyTorch was imported
        new = True, False, True, [(False, dtype) for _, dtype in current[3]]
    return _NO_CHANGE if current is None or new is None or new == current else _changed(current, new)


@contextmanager
def _changed(current: tuple[Any, ...], new: tuple[Any, ...]) -> Iterator[None]:
    with sys.modules["torch"].inference_mode(new[1]):  # its end restores this one, and the mode of gradients
        _use(*new)
        try:
            yield
        finally:
            _use(*current)


def _use(grad: bool, _: bool, caches_casts: bool, autocast: list[tuple[bool, Any]]) -> None:
    torch = sys.modules["torch"]
    torch.set_grad_enabled(grad)
    torch.set_autocast_cache_enabled(caches_casts)
    for device, (is_enabled, dtype) in zip(_DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
