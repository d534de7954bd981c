"""A group of ranks: its topology, communicators, agreement and end, in one object."""
