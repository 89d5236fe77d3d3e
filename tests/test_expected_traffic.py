"""The bytes that each rank sends equal the prediction from one run of the unmodified model on one device."""

import pytest
import torch

from benchmarks.harness import counted_traffic
from benchmarks.pipelines.latents import observed
from benchmarks.pipelines.traffic import sent_in_rounds
from para_core.adapters import parallelize_transformer
from para_core.adapters.planner.mesh import MeshShape
from tests.adapters.test_transformers import call
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.slow

# The sizes (frames, height, width) in latent pixels give an odd number of tokens, and fewer than ranks.
SIZES = [(3, 6, 10), (1, 2, 2)]
# The planner does not count the exchanges of attention by heads.
COUNTED = [name for name in MODELS if name not in ("anyflow far", "kandinsky 6 sr", "wan animate 2")]


def count_in_models(names, shape):
    batch, ring, ulysses = shape
    sent = {}
    for name in names:
        heartbeat()
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(ring, ulysses, batch=batch))
        for size in SIZES:
            with counted_traffic() as traffic:
                call(transformer, name, size)
            sent[name, size] = traffic.bytes
    return sent


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param((1, 2, 1), ["qwen-image 2.1", "sana"], id="ring 2"),
        pytest.param((1, 1, 3), ["flux"], id="fewer tokens than ranks"),
        pytest.param((2, 1, 1), ["mochi", "cogvideox", "hidream"], id="batch 2"),
        pytest.param((1, 2, 2), COUNTED, id="ring 2 × ulysses 2", marks=pytest.mark.long),
    ],
)
def test_bytes_of_every_transformer_equal_the_formula(rank_pool, shape, names):
    batch, ring, ulysses = shape
    mesh = MeshShape(batch, ring=ring, ulysses=ulysses)
    expected = {}
    for name in names:
        model = MODELS[name].build()
        for size in SIZES:
            with observed(model, batch) as calls:
                call(model, name, size)
            expected[name, size] = calls
    for rank, sent in enumerate(rank_pool.run(count_in_models, torch.Size(shape).numel(), names, shape)):
        for key, counted in sent.items():
            assert counted == sent_in_rounds([expected[key]], mesh, rank, apart=False), (key, rank)
