"""Predicted seconds, bytes and memory of a mesh, counted from the model, before anything runs on it."""
