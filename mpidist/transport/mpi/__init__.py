"""Messages between ranks: MPI loaded, started and used on host memory."""
