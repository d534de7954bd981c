"""Libraries that can be measured: a module for each, imported by its ranks alone."""
