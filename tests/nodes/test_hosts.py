"""Hosts of two ranks each, with a torchrun on each, compared with one process."""

import pytest
import torch

from benchmarks.faults.hosts import NotAllowed, open_hosts, torchrun
from benchmarks.pipelines.latents import PIPELINES
from tests.tiny import relative_error

pytestmark = pytest.mark.nodes


@pytest.mark.parametrize(("num_hosts", "namespaces"), [(3, True), (2, False)])
def test_several_hosts_equal_one_process(tmp_path, num_hosts, namespaces):
    pipes = {name: PIPELINES[name] for name in ("flux", "wan")}
    expected = {name: pipe.build()(**pipe.call(), return_dict=False)[0] for name, pipe in pipes.items()}
    try:
        with open_hosts(num_hosts, namespaces=namespaces) as hosts:
            torchrun(hosts, "tests.nodes.generate", str(tmp_path), *expected)
    except NotAllowed as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    for rank in range(2 * num_hosts):
        report = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert report["dims"] == {"ring": list(range(num_hosts)), "ulysses": [rank // 2] * 2}
        for name, image in expected.items():
            assert relative_error(report["images"][name], image) < 1e-5, f"{name} on rank {rank}"
