"""Messages between ranks: MPI, found, started and used on host memory."""
