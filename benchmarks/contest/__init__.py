"""Libraries that all-reduce, side by side: each a group of processes that sleeps until it is its turn.

peers.py is the program; README.md beside it says what is measured and how. Here:

    work.py          what is summed, and whether the sums are right
    way.py           one way to sum it, and what a library must offer for that
    over_*.py        the ways of one library each
    rank.py          the program of one rank of one group
    meeting.py       the barrier before each step, the same for all libraries
    environments.py  which libraries are installed, and how their ranks are started
    group.py         the ranks of one library, as the program that measures sees them
    measuring.py     the turns and rounds
    roofline.py      what the memory of the machine allows
    targets.py       the ratios that are asked for
    tables.py        what is printed and recorded

What a rank imports (the first five) also runs with Python 3.8, which ChainerMN and Horovod want.
"""
