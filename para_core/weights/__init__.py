"""Distributed weights: FSDP2, tensor parallelism, pipeline stages and PipeFusion."""
