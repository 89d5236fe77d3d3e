"""Predicted seconds, bytes and memory of a mesh, counted from the model, before anything runs on it."""

from para_core.planner.hardware import Device, Link
from para_core.planner.mesh_plan import MeshPlan
from para_core.planner.prediction import MeshPrediction

__all__ = ["Device", "Link", "MeshPlan", "MeshPrediction"]
