"""Memory that the ranks of a node share: windows, and the barrier, the slots and the arrays that lie in windows."""
