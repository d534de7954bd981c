"""Ranks and flat arrays: the nodes of the ranks, and how memory moves between ranks.

Nothing here depends on strategies, replicas or gradients.
"""
