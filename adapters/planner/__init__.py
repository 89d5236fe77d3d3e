"""Predict whether a generation fits, which mesh is best, and a range of seconds.

``work`` and ``weights`` say what a generation takes, ``predict`` what it costs on one mesh, ``choose`` which
mesh is best, and ``predictions`` says it. ``count`` counts without weights; ``published`` has stored counts.

Tests: tests/planner/test_count.py for counts; test_predict.py there for memory, traffic, seconds
and the choice of a mesh; test_default_mesh.py there for the mesh of ``parallelize_pipe`` without ``mesh=``.
"""

from collections.abc import Mapping

# The functions that other rooms ask for through :mod:`para_core.adapters.features`, with their modules.
PROVIDES: Mapping[str, str] = {
    "choose_default_mesh": "para_core.adapters.planner.default_mesh",
    "predict_bytes": "para_core.adapters.planner.plan_mesh",
}
