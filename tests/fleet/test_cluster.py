"""The Ray cluster to which a fleet connects, with a stand-in for Ray's own start."""

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray

from para_core.fleet import group
from para_core.fleet.rank import ReplicaOptions


class StandIn:
    """A stand-in for ``ray.init`` on a machine with or without clusters; records what was started."""

    def __init__(self, monkeypatch, *, noted=False, alive=False):
        self.noted, self.alive, self.started = noted, alive, []
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(self, address=None, num_cpus=None, **_):
        # Ray treats addresses so: "auto" would take any cluster, and None the one that ray start or RAY_ADDRESS noted,
        # or a new one.
        assert address in (None, "local")
        if address is None and self.noted:
            if num_cpus is not None:
                raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")
            if not self.alive:
                raise ConnectionError("Could not find any running Ray instance.")
            self.started.append("joined")
        else:
            self.started.append(f"{address} with {num_cpus >= 7} CPUs")


def test_a_cluster_of_another_program_is_not_joined(monkeypatch):
    ray_ = StandIn(monkeypatch)
    assert group.connect(7, debug=False)
    assert ray_.started == ["None with True CPUs"]


def test_ray_cluster_is_joined_or_replaced(monkeypatch):
    ray_ = StandIn(monkeypatch, noted=True, alive=True)
    assert group.connect(7, debug=False)
    assert ray_.started == ["joined"]
    ray_ = StandIn(monkeypatch, noted=True, alive=False)
    assert group.connect(7, debug=False)
    assert ray_.started == ["local with True CPUs"]


def test_named_address_without_cluster_raises(monkeypatch):
    StandIn(monkeypatch, noted=True, alive=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RuntimeError, match=r"RAY_ADDRESS .*'127\.0\.0\.1:1'"):
        group.connect(7, debug=False)


def test_slow_start_is_retried(monkeypatch):
    ray_ = StandIn(monkeypatch)
    init, late = ray_.init, ["The current node timed out during startup."]

    def slow(**options):
        if late:
            raise Exception(late.pop())
        init(**options)

    monkeypatch.setattr(ray, "init", slow)
    assert group.connect(7, debug=False)
    assert ray_.started == ["None with True CPUs"]
    late += ["no space left"]
    with pytest.raises(RuntimeError, match=r"Ray .*: no space left"):
        group.connect(7, debug=False)


def nodes(monkeypatch, *cpus):
    alive = [{"Alive": True, "Resources": {"CPU": float(each)}} for each in cpus]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(cpus))})


def test_replica_without_room_names_spread(monkeypatch):
    nodes(monkeypatch, 2, 3, 1)
    group.require_cluster(ReplicaOptions(2), 2)
    group.require_cluster(ReplicaOptions(3, spread=True), 2)
    message = r"2 replicas of 3 ranks .* 2, 3, 1 CPUs: .*--spread"
    with pytest.raises(ValueError, match=message):
        group.require_cluster(ReplicaOptions(3), 2)
    with pytest.raises(ValueError, match=r"4 replicas of 2 ranks .*8 CPUs, .*6"):
        group.require_cluster(ReplicaOptions(2, spread=True), 4)
