"""Checks that all ranks make the same call of a pipeline in the same state, and that all of them fail together."""
