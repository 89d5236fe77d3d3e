"""Ranks: the mesh, its process groups, collectives, layouts, sharding, and checks that ranks agree."""
