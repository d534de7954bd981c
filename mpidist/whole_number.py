"""The checks of arguments that count something, or answer yes or no."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

__all__ = ["require_bool", "whole_number"]


def whole_number(what: str, value: Any, least: int | None = None, otherwise: str = "") -> int:
    """Return a whole number as an int; a truth value is no number. Local.

    `what` it is, and what a user can pass `otherwise`, such as "None for all", are for the error: a `TypeError`, or a
    `ValueError` if it is below `least`.
    """
    bound = "" if least is None else f" >= {least}"
    needed = f"{what} must be a whole number{bound}{otherwise and f', or {otherwise}'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{needed}, got {value!r}")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{needed}, got {number}")
    return number


def require_bool(what: str, value: Any, otherwise: str = "") -> bool:
    """Return a truth value as a bool; refuse all else, such as the text "no", which Python takes for true. Local."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} must be True or False{otherwise and f', or {otherwise}'}, got {value!r}")
    return bool(value)
