"""Distribute the weights of a diffusers pipeline: FSDP2, tensor parallelism, pipeline stages, PipeFusion and
LoRAs.
"""
