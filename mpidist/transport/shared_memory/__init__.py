"""Reductions of the ranks of a node through the memory that they share."""
