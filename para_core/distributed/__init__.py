"""Meshes, process groups, collectives, and checks that ranks agree."""
