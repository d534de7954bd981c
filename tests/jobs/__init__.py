"""Jobs of their own that tests start: real ranks, on one host and on several, in which something goes wrong."""
