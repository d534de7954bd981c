"""What the ranks of mpidist measure: a function for each case of `harness.cases`."""
