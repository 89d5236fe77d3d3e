"""Predictions of the seconds, bytes and memory that a model needs on a mesh, before anything runs on that mesh."""

from para_core.planner.hardware import Device, Link
from para_core.planner.mesh_plan import MeshPlan
from para_core.planner.prediction import MeshPrediction

__all__ = ["Device", "Link", "MeshPlan", "MeshPrediction"]
