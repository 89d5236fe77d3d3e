"""Meshes, process groups, collectives, token layouts, sharding, and checks that ranks agree."""
