"""Failures: find ranks that are late or lost, notify the other ranks, record calls, end the job."""
