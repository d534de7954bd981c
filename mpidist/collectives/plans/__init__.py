"""What equal calls have in common: their arithmetic, how their arrays are cut, and how calls are carried out."""
