"""Ranks of a node, and the memory that all of them reach."""
