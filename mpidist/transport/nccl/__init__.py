"""Device memory between ranks by NCCL, and what may be launched when."""
