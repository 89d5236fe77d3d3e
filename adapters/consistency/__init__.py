"""Checks that every rank makes the same call of a pipeline, in the same state, and fails together."""
