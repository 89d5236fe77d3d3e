"""Tiny pipelines with random weights."""
