"""The strategies, one in each file. A strategy only chooses parts."""
