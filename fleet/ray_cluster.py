"""The connection to a Ray cluster, and what a rank takes of its resources.

replicas.py calls this file, if :func:`~para_core.fleet.choice_of_ray.uses_ray`: :func:`connect`, then
:func:`require_cluster`. `group.py` places ranks in the cluster. Tests: tests/fleet/test_ray.py with stand-ins
for Ray, and test_replicas.py with a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray

from para_core.fleet.rank import ReplicaOptions
from para_core.foreign_errors import is_ray_running_already, is_slow_start_of_ray
from para_core.launcher.interrupts import keep_sigterm_handler

# Number of attempts to start Ray. Ray gives a node half a minute to start, which is too short on a busy
# machine.
_START_ATTEMPTS = 4


def connect(cpus: int, *, debug: bool) -> bool:
    """Connect to the Ray cluster of ``ray start`` or ``RAY_ADDRESS``; if there is none, start one on this
    machine. ``launch(hosts=...)`` starts none: it calls ``connect_to_ray`` in ``launcher/hosts.py``.

    A cluster that another program started for itself is not used, because it ends with that program. (Ray's
    ``address="auto"`` would use it.) Return whether this call connected; the process may have been connected
    before. ``cpus`` is the least number of CPUs of a cluster that is started here, and ``debug`` shows Ray's
    log messages. Sets the environment variables ``RAY_worker_niceness`` and ``RAY_USAGE_STATS_ENABLED`` of this
    process, and leaves them set, unless the user has set them.

    Raises:
        RuntimeError: Ray does not start, or ``RAY_ADDRESS`` is invalid, or no cluster answers there.
    """
    if ray.is_initialized():
        return False
    # With Ray's default niceness of 15, ranks would get little CPU time on a busy machine, and wait for each
    # other.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {}
    if not debug:
        options = {"logging_level": "ERROR", "log_to_driver": False}
    # num_cpus also makes Ray refuse a running cluster, by a ValueError, which _start passes on. Without it,
    # ray.init would join that cluster at once, and _join would never run.
    here = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False, **options}
    with keep_sigterm_handler():
        try:
            _start(**here)
        except ValueError as error:
            if not is_ray_running_already(error):
                raise RuntimeError(
                    f"RAY_ADDRESS is {os.environ.get('RAY_ADDRESS')!r}, and Ray refuses it: {error}. Expected "
                    "HOST:PORT, or auto for the cluster of ray start on this host."
                ) from error
            _join(here, options)
    return True


def _join(here: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Connect to the running cluster with ``options``, which are not those of a new one. If it has ended,
    start one with the options ``here``. Raises what :func:`connect` raises.
    """
    try:
        ray.init(**options)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise RuntimeError(f"RAY_ADDRESS is {address!r}, but no Ray cluster answers there.") from error
        # Ray found a cluster by the address file of ray start, but that cluster ended without ray stop.
        _start(address="local", **here)


def _start(**options: Any) -> None:
    """Call ``ray.init``, and again if a node starts too slowly.

    Raise ValueError if there is a cluster already, for which Ray refuses ``num_cpus``, or if ``RAY_ADDRESS``
    is set and invalid, and RuntimeError if Ray does not start.
    """
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:
            # Ray raises ValueError for other reasons as well, such as too little free memory.
            is_about_cluster = is_ray_running_already(error) or bool(os.environ.get("RAY_ADDRESS"))
            if isinstance(error, ValueError) and is_about_cluster:
                raise
            # If a node starts too slowly, Ray raises a bare Exception, so the message has to be compared.
            if attempt == _START_ATTEMPTS or not is_slow_start_of_ray(error):
                raise RuntimeError(f"Ray does not start on this machine: {describe_cause(error)}") from error
            ray.shutdown()


def require_cluster(options: ReplicaOptions, replicas: int) -> None:
    """Check that the connected cluster is large enough for ``replicas`` replicas.

    Counts all resources of the cluster, not the free ones: a replica waits for those that others use
    (:meth:`~para_core.fleet.group.RayReplica.start`).

    Raises:
        ValueError: The cluster has too few GPUs or CPUs, or its nodes are too small for a replica each, or
            for as many ranks if replicas may ``spread`` over nodes.
    """
    bundle = resources_of_rank()
    has = ray.cluster_resources()
    for kind, each in bundle.items():
        needed = each * options.ranks * replicas
        if needed > has.get(kind, 0):
            raise ValueError(
                f"{replicas} replicas of {options.ranks} ranks need {needed:g} {kind}s, and the Ray cluster has "
                f"{has.get(kind, 0):g}: use fewer (--replicas, --ranks), or add nodes with ray start."
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_of_kind = [f"{', '.join(f'{node.get(kind, 0):g}' for node in nodes)} {kind}s" for kind in bundle]
    if options.spread:
        # A rank takes its bundle from one node, so the sums above may suffice although the nodes do not: the
        # CPUs may be on one node, and the GPUs on another.
        room = sum(_count_fitting(node, bundle, 1) for node in nodes)
        if room < replicas * options.ranks:
            raise ValueError(
                f"{replicas} replicas of {options.ranks} ranks need {' and '.join(f'1 {kind}' for kind in bundle)} "
                f"of one node for each rank. The nodes of the Ray cluster have {' and '.join(has_of_kind)}, enough for "
                f"{room} ranks: use fewer (--replicas, --ranks), or start nodes with more (ray start --num-cpus)."
            )
    elif sum(_count_fitting(node, bundle, options.ranks) for node in nodes) < replicas:
        raise ValueError(
            f"{replicas} replicas of {options.ranks} ranks need one node each, and the nodes of the Ray cluster have "
            f"{' and '.join(has_of_kind)}: use fewer ranks (--ranks), or serve --spread, which places a replica on "
            "several nodes."
        )


def _count_fitting(node: Mapping[str, float], bundle: Mapping[str, float], ranks: int) -> int:
    """Return how many replicas of ``ranks`` ranks, which take a ``bundle`` each, fit on a node with these resources."""
    return min(int(node.get(kind, 0) // (each * ranks)) for kind, each in bundle.items())


def resources_of_rank() -> dict[str, float]:
    """Return the bundle of resources that a rank takes: a CPU, and a GPU if the cluster has any."""
    bundle = {"CPU": 1.0}
    if ray.cluster_resources().get("GPU", 0):
        bundle["GPU"] = 1.0
    return bundle


def describe_cause(error: BaseException) -> str:
    """Return the first nonempty line of an exception that Ray raised, or of the cause that it wraps."""
    lines = str(getattr(error, "cause", None) or error).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)
