"""Requests and answers: what is in a message, and the two ends of the messages between a worker and a server."""
