"""The ways of each benchmark over MPI: raw mpi4py, and mpidist. A file has the name of its benchmark."""
