"""Ranks and flat arrays: who is where, and how memory moves between them.

Nothing here knows of strategies, replicas or gradients.
"""
