"""Costs of all-reduces: the cost model, and the file of measured numbers."""
