"""The program that measures: which libraries there are, whose turn it is, and what is printed and recorded."""
