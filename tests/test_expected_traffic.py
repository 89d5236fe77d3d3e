"""The bytes that each rank sends equal the prediction of benchmarks.pipelines.latents from one run of the unmodified
model on one device.
"""

import warnings

import pytest
import torch

from benchmarks.harness import counted_traffic
from benchmarks.pipelines.latents import observe_pipeline, observed, takes_turns
from benchmarks.pipelines.traffic import sent_in_rounds
from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.plan_mesh import workload_of
from para_core.adapters.planner.predict import traffic_of
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.transformers.registry import MODELS, SHELF

pytestmark = pytest.mark.slow

# The sizes (frames, height, width) in latent pixels give an odd number of tokens, and fewer than ranks.
SIZES = [(3, 6, 10), (1, 2, 2)]


def call(transformer, name, size):
    frames = size[0] * 2 if name == "cogvideox 1.5" else size[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer(**MODELS[name].inputs(frames, *size[1:]), return_dict=False)


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


# This is the first model of each class. Those of the shelf are in the long run.
ONE_OF_EACH = list({model.cls: name for name, model in reversed(MODELS.items()) if name not in SHELF}.values())


# The planner does not count the exchanges of attention by heads.
COUNTED = [name for name in MODELS if name not in ("anyflow far", "kandinsky 6 sr", "wan animate 2")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        # In addition there are a model with as many attention calls as images, and one of linear attention and
        # convolutions.
        pytest.param((1, 1, 2), [*ONE_OF_EACH, "qwen-image 2.1", "sana"], id="ulysses 2"),
        pytest.param((1, 2, 1), ONE_OF_EACH, id="ring 2", marks=pytest.mark.long),
        pytest.param((2, 1, 1), ["mochi", "cogvideox", "hidream"], id="batch 2"),
        pytest.param(
            (1, 2, 1), [name for name in SHELF if name in COUNTED], id="ring 2, shelf", marks=pytest.mark.long
        ),
        pytest.param((1, 1, 3), COUNTED, id="ulysses 3", marks=pytest.mark.long),
        pytest.param((1, 2, 2), COUNTED, id="ring 2 × ulysses 2", marks=pytest.mark.long),
        pytest.param((2, 1, 2), COUNTED, id="batch 2 × ulysses 2", marks=pytest.mark.long),
    ],
)
def test_bytes_of_every_transformer_equal_the_formula(rank_pool, shape, names):
    expected = {}
    for name in names:
        model = MODELS[name].build()
        for size in SIZES:
            with observed(model, shape[0]) as calls:
                call(model, name, size)
            expected[name, size] = calls
    for rank, sent in enumerate(rank_pool.run(count_in_models, torch.Size(shape).numel(), names, shape)):
        for key, counted in sent.items():
            batch, ring, ulysses = shape
            mesh = MeshShape(batch, ring=ring, ulysses=ulysses)
            assert counted == sent_in_rounds([expected[key]], mesh, rank, apart=False), (key, rank)


def test_output_of_few_tokens_with_sharded_text_is_gathered(rank_pool):
    size, model = SIZES[1], MODELS["flux"].build()  # The image has 4 tokens and the text has 9, on 3 ranks.
    with observed(model, 1) as calls:
        call(model, "flux", size)
    for rank, sent in enumerate(rank_pool.run(count_in_models, 3, ["flux"], (1, 1, 3))):
        assert sent["flux", size] == sent_in_rounds([calls], MeshShape(ulysses=3), rank, apart=False)


# The branches are called one after the other (two calls of a step, of one and of two models), absent, in one batch,
# called by a guider, in a batch that the model separates, or use keys that a first step caches.
GUIDED = ["wan", "wan 2.2", "hunyuan", "mochi", "hunyuan 1.5", "pixart, perturbed", "qwen-image 2.1"]


def generate(pipe, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe(**PIPELINES[name].call())


def count_in_pipelines():
    sent = {}
    for name in GUIDED:
        heartbeat()
        pipe = parallelize_pipe(PIPELINES[name].build(), mesh=cpu_mesh(1, 1, batch=2))
        with counted_traffic() as traffic:
            generate(pipe, name)
        sent[name] = traffic.bytes
    return sent


@pytest.mark.long
def test_bytes_of_shared_branches_equal_the_formula(rank_pool):
    results = rank_pool.run(count_in_pipelines, 2)
    for name in GUIDED:
        pipe = PIPELINES[name].build()
        rounds = observe_pipeline(pipe, lambda pipe=pipe, name=name: generate(pipe, name), batch=2)
        assert len(rounds) == 3
        for rank, sent in enumerate(results):
            assert sent[name] == sent_in_rounds(rounds, MeshShape(batch=2), rank, apart=takes_turns(pipe)), (name, rank)


def test_a_model_of_real_size_needs_no_weights():
    """Check a model of real size, with 57 attention calls of 24 heads × 128 over 4096 + 512 tokens. 4096 tokens of 64
    channels are gathered.
    """
    sent = traffic_of(MeshShape(ulysses=2), workload_of("FLUX.1-dev"))
    tokens, heads = 4608 // 2, 24 // 2
    assert sent == (57 * 4 * tokens * heads * 128 + 2048 * 64) * 2
