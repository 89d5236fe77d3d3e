"""Weights that one device does not hold alone: FSDP2 and tensor parallelism of PyTorch, under attention and caches as
they are.
"""
