"""`python -m mpidist flight`: the flight recorders of a job in one report, and where its ranks diverged."""
