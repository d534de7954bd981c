"""The harness: environments of the libraries, their sleeping ranks, turns, tables and records."""
