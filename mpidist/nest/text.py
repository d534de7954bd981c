"""Paths of leaves and forms of nests, as text in Python's notation."""

from __future__ import annotations

from itertools import repeat
from typing import Any, Final

from mpidist.nest.keys import LABELLED, PLAIN
from mpidist.nest.structure import LEAF, Structure

__all__ = ["array_names", "form_text", "paths"]

_BRACKETS: Final = {"list": "[]", "tuple": "()"}
_MAX_STARS: Final = 4  # longer lists of leaves are written as `* x 5`


def paths(structure: Structure) -> list[str]:
    """Write the path of each leaf: `[17]['bias']`; an empty text for a leaf that is in no nest."""
    if structure == LEAF:
        return [""]
    name, steps, *parts = structure
    branches = zip(_steps(name, steps), parts or repeat(LEAF), strict=False)
    return [step + rest for step, part in branches for rest in paths(part)]


def array_names(structure: Structure) -> list[str]:
    """Name each array of a nest: `array ['bias']`; `array 0` for one that is in no nest."""
    return [f"array {path or 0}" for path in paths(structure)]


def form_text(structure: Structure) -> str:
    """Write a structure with stars for leaves, `{'w': *, 'b': [*, *]}`. Different structures have different texts."""
    if structure == LEAF:
        return "*"
    name, steps, *parts = structure
    forms = [form_text(part) for part in parts]
    if isinstance(steps, int):
        stars = ["*"] * steps if steps <= _MAX_STARS else [f"* x {steps}"]
        brackets = _BRACKETS.get(name, f"{name}[]")
        return f"{brackets[:-1]}{', '.join(forms or stars)}{brackets[-1]}"
    forms = forms or ["*"] * len(steps)
    if name in (PLAIN, LABELLED):
        keys = map(repr, steps) if name == PLAIN else steps
        return "{" + ", ".join(f"{key}: {form}" for key, form in zip(keys, forms, strict=True)) + "}"
    return f"{name}({', '.join(step.lstrip('.') + '=' + form for step, form in zip(steps, forms, strict=True))})"


def _steps(name: str, steps: Any) -> list[str]:
    if isinstance(steps, int):
        return [f"[{index}]" for index in range(steps)]
    if name == PLAIN:
        return [f"[{key!r}]" for key in steps]
    return [f"[{label}]" for label in steps] if name == LABELLED else list(steps)
