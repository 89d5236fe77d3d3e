"""Tiny transformers with random weights."""
