"""One rank of a group, and the libraries that it can measure. Runs with Python 3.8, too, which old libraries want."""
