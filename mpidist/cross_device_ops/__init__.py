"""The all-reduce algorithms, one per file."""
