"""Plans of equal calls: their arithmetic, the cuts of their arrays, and the execution."""
