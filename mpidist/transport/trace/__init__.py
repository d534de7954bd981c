"""Traces: the calls of all ranks and their phases, in files that can be merged."""
