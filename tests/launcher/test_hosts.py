"""Ranks on several hosts, which are nodes of a Ray cluster on this machine."""

import os
import signal
import socket
import threading
import time
from unittest import mock

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray
import torch
from ray.cluster_utils import Cluster

from para_core import Cancelled, RankDied, launch
from para_core.launcher import hosts
from tests.launcher.loads import alive, load_steps, pids
from tests.launcher.test_cancel import when_called

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


def test_handle_on_two_hosts_is_the_same_and_missing_room_is_named(cluster):
    with launch(load_steps, ranks=2, hosts=2, progress=False, env={"OWN": "1"}) as pipe:
        processes = pids(pipe)
        names = ("OWN", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        environment = pipe.run(lambda pipe: [os.environ[name] for name in names], all_ranks=True)
        assert environment == [["1", "0", "1"]] * 2
        large = torch.arange(100_000.0)
        seen = []

        def callback(pipe, step, timestep, tensors):
            seen.append(step)
            return {"x": tensors["x"] + 1}

        assert torch.equal(pipe(3, callback_on_step_end=callback, x=large)["x"], large + 3)
        assert seen == [0, 1, 2]
        when_called(pipe.cancel)
        with pytest.raises(Cancelled):
            pipe(1000, seconds=0.02)
        os.kill(processes[1], signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
            pipe(1)
        assert pipe(1) == {}
        processes = pids(pipe)
    assert alive(processes) == []
    with pytest.raises(RuntimeError, match="no 3 hosts with 1 free CPUs each"):
        launch(load_steps, ranks=3, hosts=3, progress=False, timeout=3)


def test_connections_without_the_secret_are_refused(monkeypatch):
    secret = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect(greeting):
            with socket.create_connection(server.getsockname()) as connection:
                for part in (greeting[:9], greeting[9:]):
                    connection.sendall(part)
                    time.sleep(0.1)
                connection.recv(1)

        stranger = threading.Thread(target=connect, args=(b"\x01" * 36,))
        stranger.start()
        stranger.join(0.5)
        rank = threading.Thread(target=connect, args=(secret + (0).to_bytes(4),), daemon=True)
        rank.start()
        living, dead = (mock.Mock(wait=lambda _, ended=ended: ended) for ended in (False, True))
        (channel,) = hosts._accept_ranks(server, [living], secret, 10.0)
        channel.close()
        begun = time.monotonic()
        dead.describe_end.return_value = "ended with exit code 1."
        for member, check, seconds, message in ((dead, 0.1, 60.0, "rank 0 ended"), (living, 60.0, 0.1, "not connect")):
            monkeypatch.setattr(hosts, "_CHECK_SECONDS", check)
            with pytest.raises(RuntimeError, match=message):
                hosts._accept_ranks(server, [member], secret, seconds)
        assert time.monotonic() - begun < 30.0
