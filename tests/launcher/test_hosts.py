"""Ranks on several hosts, which are nodes of a Ray cluster on this machine."""

import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from unittest import mock

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray
import torch
from ray.cluster_utils import Cluster

from para_core import RankDied, launch
from para_core.launcher import hosts
from tests.launcher.loads import alive, load_steps, pids

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    """Return a Ray cluster of two nodes, to which this process is connected."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_handle_on_two_hosts_is_the_same(cluster):
    with launch(load_steps, ranks=2, hosts=2, progress=False, env={"OWN": "1"}) as pipe:
        processes = pids(pipe)
        names = ("OWN", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        environment = pipe.run(lambda pipe: [os.environ[name] for name in names], all_ranks=True)
        assert environment == [["1", "0", "1", "2"]] * 2
        # Other users of a host can read arguments, so the secret, of 64 digits, is none of them.
        assert max(map(len, pipe.run(lambda pipe: sys.argv))) < 64
        large = torch.arange(100_000.0)
        result = pipe(3, callback_on_step_end=lambda pipe, step, *args: {"x": args[-1]["x"] + 1}, x=large)
        assert torch.equal(result["x"], large + 3)
        os.kill(processes[1], signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
            pipe(1)
        assert pipe(1) == {}
        processes = pids(pipe)
    assert alive(processes) == []


@pytest.mark.parametrize("error", [None, ray.exceptions.GetTimeoutError(), ray.exceptions.ActorDiedError()])
def test_missing_hosts_and_agents_are_named_at_once(monkeypatch, error):
    message = f"installed on every host.*{type(error).__name__}"
    second = {"CPU": 2.0, "GPU": 8.0}
    if error is None:
        message, second["CPU"] = "no 2 hosts with 2 CPUs and 2 GPUs each, only 1", 1.0
    cluster = mock.Mock(exceptions=ray.exceptions, get=mock.Mock(side_effect=error))
    cluster.cluster_resources.return_value = {"CPU": 4.0, "GPU": 10.0}
    cluster.nodes.return_value = [{"Alive": True, "Resources": node} for node in ({"CPU": 2.0, "GPU": 2.0}, second)]
    monkeypatch.setattr(hosts, "connect_to_ray", lambda: cluster)
    with pytest.raises(RuntimeError, match=message):
        hosts.start_ranks_on_hosts(4, 2, 1800.0, {})


def test_lost_host_is_no_error_of_its_agent(monkeypatch):
    process, error_of_agent = hosts.RemoteProcess(mock.Mock(), 0), ray.exceptions.RayTaskError("wait", "", KeyError(0))
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=[ray.exceptions.ActorDiedError(), error_of_agent]))
    assert "lost" in process.describe_end()
    with pytest.raises(ray.exceptions.RayTaskError):
        process.wait(40.0)
    assert ray.get.call_args.kwargs["timeout"] > 40.0  # else a living process counts as ended


def test_connections_without_the_secret_are_refused_and_those_of_ranks_closed_after_a_failure(monkeypatch):
    secret, number = bytes(32), bytes(4)
    living, dead = (mock.Mock(wait=lambda _, ended=ended: ended) for ended in (False, True))
    dead.describe_end.return_value = "ended with exit code 1."
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = partial(socket.create_connection, server.getsockname(), 10.0)
        with connect() as stranger, connect() as rank:
            stranger.sendall(b"\x01" * 36)
            rank.sendall(secret[:9])
            threading.Timer(0.3, rank.sendall, [secret[9:] + number]).start()
            with hosts._accept_ranks(server, [living], secret, 10.0)[0]._sock as connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert stranger.recv(1) == b""
        for second, check, seconds, message in (
            (dead, 0.1, 60.0, "rank 1 ended"),
            (living, 60.0, 0.5, r"\[1\] did not"),
        ):
            monkeypatch.setattr(hosts, "_CHECK_SECONDS", check)
            with connect() as rank:
                rank.sendall(secret + number)
                with pytest.raises(RuntimeError, match=message):
                    hosts._accept_ranks(server, [living, second], secret, seconds)
                assert rank.recv(1) == b""
