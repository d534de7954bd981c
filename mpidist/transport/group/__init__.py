"""A group of ranks, put together: topology, communicators, agreement, end."""
