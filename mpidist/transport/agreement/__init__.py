"""Do all ranks make the same call? Asked before data moves."""
