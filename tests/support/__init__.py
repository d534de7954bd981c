"""What tests of several modules share: values, placements, and what must be the same on all ranks."""
