"""Checks whether para_core can run a model with the features of diffusers and accelerate that it uses."""
