"""CuPy, NCCL and GPUs without a GPU: the stand-in, and what its tests share."""
