"""Requests and replies: the content of messages, and the two ends of the messages between a worker and a server."""
