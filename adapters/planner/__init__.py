"""Planner for diffusers pipelines: counts the work of a generation and predicts the fastest mesh."""
