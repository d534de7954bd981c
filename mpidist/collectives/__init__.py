"""One collective call, from the user's values to a transport and back."""
