"""Failures: find ranks that are late or lost, tell the other ranks, record calls, end the job."""
