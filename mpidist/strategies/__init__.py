"""The strategies, one per file. A strategy only chooses parts."""
