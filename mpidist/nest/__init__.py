"""Nests of values: flattened, rebuilt, compared by structure, described in text, and written as bytes."""

from mpidist.nest.encoding import Handle, decode, encode
from mpidist.nest.structure import LEAF, Structure, flatten, map_structure, rebuild
from mpidist.nest.text import array_names, form_text, paths

__all__ = [
    "LEAF",
    "Handle",
    "Structure",
    "array_names",
    "decode",
    "encode",
    "flatten",
    "form_text",
    "map_structure",
    "paths",
    "rebuild",
]
