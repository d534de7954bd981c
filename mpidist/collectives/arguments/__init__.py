"""What a rank passes to a call: values, destinations and outs, checked, and described for the other ranks."""
