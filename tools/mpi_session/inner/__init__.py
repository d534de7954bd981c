"""The session of one rank: it runs the tests in step with the other ranks."""
