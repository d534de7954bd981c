"""Nests of values: opened, compared by their keys, told in words."""

from mpidist.nest.structure import LEAF as LEAF
from mpidist.nest.structure import Structure as Structure
from mpidist.nest.structure import flatten as flatten
from mpidist.nest.structure import map_structure as map_structure
from mpidist.nest.structure import rebuild as rebuild
