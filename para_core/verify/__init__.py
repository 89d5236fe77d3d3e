"""Comparison of a model on virtual ranks (threads of this process) with the unmodified model."""
