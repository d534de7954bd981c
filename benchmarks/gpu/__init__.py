"""What `gpu_check.py` measures on one GPU: a module a question, each runnable alone as `python -m gpu.pack`."""
