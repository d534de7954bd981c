"""Arguments of a call on one rank: values, destinations and outs, checked, and described for the other ranks."""
