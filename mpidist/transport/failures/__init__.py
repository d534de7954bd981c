"""Ranks that are late, that fail and that end: noticed, told and written down."""
