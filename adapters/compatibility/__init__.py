"""Phases in which a model is checked, and the checks of features of diffusers and accelerate."""
