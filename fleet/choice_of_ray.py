"""The choice between this host and a Ray cluster. Imports neither torch nor Ray."""

from __future__ import annotations

import os


def uses_ray(*, spread: bool) -> bool:
    """Whether replicas run on Ray: if ``RAY_ADDRESS`` names a cluster, or ranks may ``spread`` over several
    nodes.
    """
    return spread or bool(os.environ.get("RAY_ADDRESS"))
