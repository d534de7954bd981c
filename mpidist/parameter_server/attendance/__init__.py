"""Which workers a server serves, which of them are lost, and what they wait for each other for."""
