"""Traces: the calls of all ranks and what each call was made of, in files that can be merged."""
