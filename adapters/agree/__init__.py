"""Check that all ranks make the same call of a pipeline in the same state, and let all of them fail together."""
