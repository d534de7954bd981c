"""Nests of values: opened, compared by their keys, told in words."""

from mpidist.nest.structure import LEAF as LEAF
from mpidist.nest.structure import Structure as Structure
from mpidist.nest.structure import flatten as flatten
from mpidist.nest.structure import map_structure as map_structure
from mpidist.nest.structure import rebuild as rebuild
from mpidist.nest.text import array_names as array_names
from mpidist.nest.text import form_text as form_text
from mpidist.nest.text import paths as paths

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
