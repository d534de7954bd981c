"""How long an all-reduce takes: the cost model, and the file of measured numbers."""
