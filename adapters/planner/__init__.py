"""Predict whether a generation fits, which mesh is best, and a range of seconds.

``work`` and ``weights`` say what a generation takes, ``predict`` what it costs on one mesh, ``choose`` which
mesh is best, and ``predictions`` says it. ``count`` counts on a model without weights, and ``published`` has
stored counts.
"""

from collections.abc import Mapping

# The functions that other rooms ask for through :mod:`para_core.adapters.features`, with their modules.
PROVIDES: Mapping[str, str] = {
    "choose_default_mesh": "para_core.adapters.planner.default_mesh",
    "predict_bytes": "para_core.adapters.planner.plan_mesh",
}
