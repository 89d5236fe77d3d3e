"""A replica whose ranks are on two nodes of a Ray cluster."""

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("ray", reason="the extra ray is not installed: make test-fleet")

import ray
from ray.cluster_utils import Cluster

from para_core.fleet import group
from para_core.fleet.build import build, find_model
from para_core.fleet.last_words import Notes
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replicas import generate_lines
from para_core.fleet.request import make_request
from para_core.fleet.work import generate

# Ray's own sockets and threads, which end with the cluster.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def two_nodes(monkeypatch):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_spread_ranks_equal_plain_pipeline(two_nodes):
    model = find_model(None)
    recipe = Recipe(model.name, timeout=120)
    request = make_request({"prompt": "a red circle", "size": "64x48", "steps": 2}, model, seed=3)
    written = []

    def on(options):
        return generate_lines(
            [Line(1, request)],
            recipe,
            options,
            1,
            write=lambda line, result: written.append(result),
        )

    with pytest.raises(ValueError, match=r"1 replicas of 2 ranks .* 1, 1 CPUs"):
        on(ReplicaOptions(2))
    assert on(ReplicaOptions(2, spread=True)) == []
    alone = Recipe(model.name)
    expected = generate(build(alone), request, alone).outputs[0].data
    assert np.abs(pixels(written[0].outputs[0].data) - pixels(expected)).max() <= 1


def test_folder_of_notes_on_another_node_is_removed_there(two_nodes, monkeypatch):
    folders = []

    def open_elsewhere(folder):
        folders.append(Path(folder))
        return Notes(folder + "_on_another_node")

    async def start_and_stop():
        replica = group.Replica(Recipe(find_model(None).name, timeout=120), ReplicaOptions(2, spread=True))
        await replica.start()
        exist = [folder.exists() for folder in folders]
        await replica.stop()
        return exist

    monkeypatch.setattr(group, "Notes", open_elsewhere)
    group.connect(2, debug=False)
    assert asyncio.run(start_and_stop()) == [False, False]


def pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image).astype(int)
