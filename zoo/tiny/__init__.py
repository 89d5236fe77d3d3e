"""Tiny transformers, pipelines and VAEs with random weights."""
