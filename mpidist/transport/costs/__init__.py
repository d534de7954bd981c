"""How long which way takes: the cost model, and what was measured for it."""
