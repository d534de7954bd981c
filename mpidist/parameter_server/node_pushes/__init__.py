"""How the workers of a node push together: they sum what each of them pushes, and one of them sends the sum."""

from mpidist.parameter_server.node_pushes.board import BOARD_BYTES, Board, boards_of
from mpidist.parameter_server.node_pushes.layout import Layout
from mpidist.parameter_server.node_pushes.node_pushes import NodePushes

__all__ = ["BOARD_BYTES", "Board", "Layout", "NodePushes", "boards_of"]
