"""The session that the user starts: it launches the ranks, and shows what happens there."""
