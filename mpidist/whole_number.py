"""The checks of arguments that count something, or answer yes or no."""

from __future__ import annotations

import numbers
from typing import Any

__all__ = ["require_bool", "whole_number"]


def whole_number(what: str, value: Any, least: int | None = None, otherwise: str = "") -> int:
    """Return a whole number as an int. Local.

    Args:
        what: What the number is, for errors.
        value: What a user passed. A truth value is no number.
        least: The least number that is allowed; any, for `None`.
        otherwise: What a user can pass besides, for errors, such as "None for all".

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is too small.
    """
    bound = "" if least is None else f" >= {least}"
    needed = f"{what} must be a whole number{bound}{otherwise and f', or {otherwise}'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{needed}, got {value!r}")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{needed}, got {number}")
    return number


def require_bool(what: str, value: Any) -> None:
    """Refuse what is no truth value, such as the text "no", which Python takes for true. Local.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r}")
