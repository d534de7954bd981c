"""Device memory between ranks by messages: through the host, or given to MPI as it is."""
