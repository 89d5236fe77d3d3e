"""Pipelines on hosts of two ranks each, with a torchrun on each host, compared with one process: `make test-nodes`."""

import subprocess
import sys

import pytest
import torch

from benchmarks.pipelines.latents import PIPELINES
from tests.nodes.hosts import NotAllowed, open_hosts, torchrun
from tests.tiny import relative_error

pytestmark = pytest.mark.nodes


def namespaces_or_skip(num_hosts):
    try:
        with open_hosts(num_hosts, namespaces=True):
            return
    except NotAllowed as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")


def generated(hosts, folder, *pipelines):
    """Return the files that the ranks wrote."""
    torchrun(hosts, "tests.nodes.generate", *pipelines, "--output", str(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2 * hosts.num_hosts)]


@pytest.mark.parametrize(("num_hosts", "namespaces"), [(2, True), (3, True), (2, False)])
def test_several_hosts_equal_one_process(tmp_path, num_hosts, namespaces):
    if namespaces:
        namespaces_or_skip(num_hosts)
    expected = {
        name: PIPELINES[name].build()(**PIPELINES[name].call(), return_dict=False)[0] for name in ("flux", "wan")
    }
    with open_hosts(num_hosts, namespaces=namespaces) as hosts:
        reports = generated(hosts, tmp_path, *expected)
    for rank, report in enumerate(reports):
        assert report["dims"] == {"ring": list(range(num_hosts)), "ulysses": [rank // 2] * 2}
        for name, image in expected.items():
            assert relative_error(report["found"][name]["out"], image) < 1e-5, f"{name} on rank {rank}"


def test_virtual_hosts_reach_each_other_and_vanish():
    namespaces_or_skip(2)
    with open_hosts(2, namespaces=True) as hosts:

        def reaches(seconds="1"):
            command = [sys.executable, "-c", CONNECT, hosts.address(1), seconds]
            return hosts.start(0, command).wait() == 0

        listening = hosts.start(1, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
        assert listening.stdout.readline() == "listening\n"
        assert reaches()
        hosts.cut(1)
        assert not reaches()
        hosts.heal(1)
        assert reaches()
        hosts.disturb(1, delay=1.0)
        assert not reaches()
        assert reaches("10")
        names = [hosts.namespace(0), hosts.namespace(1)]
    listening.wait(10)
    listening.stdout.close()
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in namespaces for name in names)


LISTEN = """
import socket
listening = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    listening.accept()[0].close()
"""
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
"""
