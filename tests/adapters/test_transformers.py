"""Every supported transformer computes on several ranks what it computes alone."""

import warnings

import diffusers
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.tiny_models import MODELS
from para_core.adapters import parallelize_transformer, unparallelize_transformer
from para_core.adapters.models.supported import ADAPTERS
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, each_rank_alone, relative_error

# (frames, height, width) in latent pixels: even and odd numbers of tokens, and fewer tokens than ranks.
SIZES = [(3, 6, 10), (1, 6, 6), (1, 2, 2)]


def tensors(output):
    """What a model returned, as tensors."""
    return [value for value in output if isinstance(value, Tensor)]


def call(transformer, name, size, **options):
    frames = size[0] * 2 if name == "cogvideox 1.5" else size[0]
    with torch.no_grad(), warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        return tensors(transformer(**MODELS[name].inputs(frames, *size[1:]), return_dict=False, **options))


def call_parallel(names, ring, ulysses, text=None, batch=1):
    outs = {}
    for name in names:
        heartbeat()
        transformer = MODELS[name].build()
        alone = call(transformer, name, SIZES[0])
        parallelize_transformer(transformer, mesh=cpu_mesh(ring, ulysses, batch=batch), text=text)
        outs[name] = [call(transformer, name, size) for size in SIZES]
        unparallelize_transformer(transformer)
        assert all(map(torch.equal, call(transformer, name, SIZES[0]), alone)), name
    return outs


def check(rank_pool, names, ring, ulysses, text=None, batch=1):
    results = rank_pool.run(call_parallel, batch * ring * ulysses, names, ring, ulysses, text, batch)
    for name in names:
        transformer = MODELS[name].build()
        expected = [call(transformer, name, size) for size in SIZES]
        for rank, outs in enumerate(results):
            for size, out, alone in zip(SIZES, outs[name], expected, strict=True):
                errors = [relative_error(one, other) for one, other in zip(out, alone, strict=True)]
                assert max(errors) < 1e-5, f"{name}, rank {rank}, {size}: {errors}"


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (1, 3), (2, 2)])
def test_every_transformer_is_exact(rank_pool, ring, ulysses):
    check(rank_pool, list(MODELS), ring, ulysses)


BATCHED = [
    name for name in MODELS if name.startswith(("cogvideox", "mochi", "ltx", "sd3", "auraflow", "pixart", "hidream"))
]


@pytest.mark.parametrize(("batch", "ring", "ulysses"), [(2, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_branches_in_one_batch_are_shared_out(rank_pool, batch, ring, ulysses):
    check(rank_pool, BATCHED, ring, ulysses, batch=batch)


def samples_of_blocks(num_samples):
    """How many samples the first block sees, of two."""
    model = MODELS["cogvideox"]
    transformer = parallelize_transformer(model.build(), mesh=cpu_mesh(1, 1, batch=2))
    inputs = model.inputs(3, 6, 10)
    inputs = {name: value if value is None else value[:num_samples] for name, value in inputs.items()}
    seen = []
    transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outs = [transformer(**inputs).sample for _ in range(2)]
    return outs, seen, [str(one.message) for one in warned]


def test_a_half_of_the_ranks_computes_a_half_of_the_samples_and_one_sample_warns_once(rank_pool):
    model = MODELS["cogvideox"]
    expected = model.build()(**model.inputs(3, 6, 10)).sample
    for num_samples in (1, 2):
        for outs, seen, warned in rank_pool.run(samples_of_blocks, 2, num_samples):
            assert max(relative_error(out, expected[:num_samples]) for out in outs) < 1e-5
            assert seen == [1, 1]
            assert len(warned) == (num_samples == 1)
            assert all("1 sample(s), which 2 ranks along 'batch' cannot share" in text for text in warned)


# Models whose text may be cut, or not.
WITH_TEXT = [name for name in MODELS if name.startswith(("qwen", "flux", "ltx"))]
CUTS_TEXT = [name for name in WITH_TEXT if not name.startswith("ltx2")]


@pytest.mark.parametrize(("names", "text"), [(CUTS_TEXT, "shard"), (WITH_TEXT, "replicate")])
def test_text_may_be_cut_or_whole(rank_pool, names, text):
    check(rank_pool, names, 1, 2, text)
    check(rank_pool, names, 3, 1, text)


def cut_text():
    transformer = MODELS["hunyuan"].build()
    with pytest.raises(ValueError, match=r"text='shard' was given, but HunyuanVideoTransformer3DModel needs all text"):
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), text="shard")
    with pytest.raises(ValueError, match=r"text is 'cut'; expected 'shard', 'replicate', or None"):
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), text="cut")


def test_text_that_cannot_be_cut_is_an_error(rank_pool):
    rank_pool.run(cut_text, 2)


def call_alone():
    outs = {}
    with each_rank_alone():
        for name in MODELS:
            heartbeat()
            transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2))
            outs[name] = call(transformer, name, SIZES[0])
    return outs


def test_these_models_depend_on_what_other_ranks_hold(rank_pool):
    for outs in rank_pool.run(call_alone, 2):
        for name, out in outs.items():
            alone = call(MODELS[name].build(), name, SIZES[0])
            assert relative_error(out[0], alone[0]) > 1e-3, name


def call_compiled(names, way, backend="aot_eager"):
    frames, outs = {}, {}
    for name in names:
        heartbeat()
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2))
        called = transformer
        if way == "whole":
            called = torch.compile(transformer, fullgraph=True, backend=counter)
        else:
            transformer.compile_repeated_blocks(fullgraph=True, backend=counter)
        outs[name] = [call(called, name, SIZES[0])]
        before = counter.frame_count
        outs[name] += [call(called, name, SIZES[0]) for _ in range(2)]
        frames[name] = (before, counter.frame_count - before)
    return outs, frames


# HunyuanVideo 1.5 asks a tensor whether an image was given, Lumina how long its texts are, HiDream which experts are asked:
# they have no whole graph alone, either.
WHOLE_GRAPH = [name for name in MODELS if not name.startswith(("hunyuan 1.5", "lumina2", "hidream"))]
# Of each way to say what is cut, one: published plans and our own, masks, several streams, pieces of tokens, batches.
SOME = [
    "wan, image context",
    "wan vace",
    "qwen-image, masked",
    "ltx2, masked, split rope",
    "helios",
    "hunyuan, image by token replacement",
    "mochi",
    "cogvideox 1.5",
    "sd3.5, controlnet",
]
REPEATED_BLOCKS = ["wan, image context", "ltx2", "hunyuan 1.5"]
MORE_BLOCKS = ["qwen-image, masked", "helios"]


def check_compiled(rank_pool, names, way, backend="aot_eager"):
    for outs, frames in rank_pool.run(call_compiled, 2, names, way, backend):
        for name in names:
            alone = call(MODELS[name].build(), name, SIZES[0])
            for out in outs[name]:
                errors = [relative_error(one, other) for one, other in zip(out, alone, strict=True)]
                assert max(errors) < 1e-5, f"{name}: {errors}"
            graphs, more = frames[name]
            assert (graphs, more) == (1, 0) if way == "whole" else more == 0, name


@pytest.mark.parametrize(
    ("way", "names"),
    [
        pytest.param("whole", SOME, id="whole"),
        pytest.param("whole", sorted({*WHOLE_GRAPH} - {*SOME}), id="whole, the others", marks=pytest.mark.long),
        pytest.param("blocks", REPEATED_BLOCKS, id="blocks"),
        pytest.param("blocks", MORE_BLOCKS, id="blocks, the others", marks=pytest.mark.long),
    ],
)
def test_compiled_they_are_exact_without_recompiling(rank_pool, way, names):
    check_compiled(rank_pool, names, way)


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE_GRAPH)
def test_inductor_is_exact_without_recompiling(rank_pool, name):
    check_compiled(rank_pool, [name], "whole", "inductor")


def test_every_adapter_is_tried():
    assert {adapter.transformer for adapter in ADAPTERS} <= {model.cls for model in MODELS.values()}


def test_every_published_plan_is_tried():
    published = {
        name
        for name in dir(diffusers)
        if isinstance(getattr(diffusers, name), type) and getattr(getattr(diffusers, name), "_cp_plan", None)
    }
    assert published <= {model.cls for model in MODELS.values()}
