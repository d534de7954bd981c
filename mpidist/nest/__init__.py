"""Nests of values: opened, compared by their keys, told in words."""

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
