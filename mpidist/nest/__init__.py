"""Nests of values: flattened, rebuilt, compared by structure, and described in text."""

from mpidist.nest.structure import LEAF, Structure, flatten, map_structure, rebuild
from mpidist.nest.text import array_names, form_text, paths

__all__ = [
    "LEAF",
    "Structure",
    "array_names",
    "flatten",
    "form_text",
    "map_structure",
    "paths",
    "rebuild",
]
