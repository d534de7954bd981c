"""`python -m mpidist trace`: one file of the traces of all ranks, and who waited for whom."""
