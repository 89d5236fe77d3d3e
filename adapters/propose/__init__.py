"""A plan for a model that nobody described: found by watching calls of it, and checked on virtual ranks."""
