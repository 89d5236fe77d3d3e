"""Pipelines whose weights are sharded: which components, which blocks, and how they are loaded."""
