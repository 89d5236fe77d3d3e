"""Computation of one attention call over a mesh."""
