"""Exactness of models that are not in diffusers, each in the mode or under its proposed plan."""
