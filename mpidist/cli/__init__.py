"""The commands of `python -m mpidist`, one in each module.

A command is `add_arguments(parser)`, and `run(arguments)`, which returns the exit status. `__main__` has the list.
"""
