"""A request on the ranks of a group, without Ray: every way to put a pipeline on them, and stopping together."""

import contextlib
import io
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.distributed.mesh_shape import parse_mesh_sizes
from para_core.fleet.build import build, dtype_of, find_model
from para_core.fleet.loras import LoadedLoras
from para_core.fleet.memory import foresee_mesh, predict_memory
from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, find_tiny_flux
from para_core.fleet.recipe import Recipe, check_options_of_model, read_lora
from para_core.fleet.request import Delivery, Lora, Request
from para_core.fleet.without_weights import without_weights
from para_core.fleet.work import Watch, generate, generate_batch
from para_core.launcher.errors import Cancelled
from para_core.plans.region import region_of
from para_core.verify import verification

FIELDS = {**TINY_FLUX_FIELDS, "height": 48, "width": 64, "num_inference_steps": 4, "prompt": "a large red circle"}
REQUEST = Request(FIELDS, seed=3)


def plain_pixels():
    pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return np.asarray(pipe(generator=torch.Generator().manual_seed(3), **FIELDS).images[0]).astype(int)


def pixels(result):
    return np.asarray(Image.open(io.BytesIO(result.outputs[0].data))).astype(int)


def result_of(recipe):
    pipe = build(recipe)
    if recipe.rotate_method is not None:
        assert region_of(pipe.transformer).options.rotate_method == recipe.rotate_method
    return generate(pipe, REQUEST, recipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"mesh": (("ring", 2),), "vae": True}, {"batch": 1, "ring": 2, "ulysses": 1}),
        ({"mesh": (("ring", 2),), "rotate_method": "2d"}, {"batch": 1, "ring": 2, "ulysses": 1}),
        ({"weights": "fsdp", "vae": True}, {"batch": 1, "ring": 1, "ulysses": 2}),
        (
            {"weights": "fsdp", "mesh": (("ring", 2),), "rotate_method": "allgather"},
            {"batch": 1, "ring": 2, "ulysses": 1},
        ),
        (
            {"weights": "tensor", "mesh": (("tensor", 2),)},
            {"batch": 1, "ring": 1, "ulysses": 1, "tensor": 2},
        ),
    ],
)
def test_each_recipe_equals_plain_pipeline(rank_pool, options, mesh):
    results = rank_pool.run(result_of, 2, Recipe(str(find_tiny_flux()), **options))
    assert results[1] is None
    assert results[0].metadata["mesh"] == mesh
    recipe = Recipe(str(find_tiny_flux()), **options)
    assert foresee_mesh(without_weights(find_model(None), dtype_of(recipe)), recipe, 2) == mesh
    assert np.abs(pixels(results[0]) - plain_pixels()).max() <= 1


def verified(recipe):
    """Return what this rank prints while it generates."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        generate(build(recipe), REQUEST, recipe)
    for handler in [*logging.getLogger(verification.__name__).handlers]:
        logging.getLogger(verification.__name__).removeHandler(handler)
    return printed.getvalue()


def test_verified_recipe_prints_error_and_bits_on_first_rank(rank_pool):
    first, second = rank_pool.run(verified, 2, Recipe(str(find_tiny_flux()), verify=True))
    assert len(re.findall(r"on 2 ranks .* error [0-9.e+-]+, .* bits", first)) == 1
    assert "on 2 ranks" not in second


def preview(recipe):
    """Return the image and the number of partial images that this rank sends."""
    request, sent = replace(REQUEST, delivery=Delivery("png", partial_images=1)), []
    result = generate(build(recipe), request, recipe, watch=Watch(preview=sent.append))
    return result, len(sent)


def test_previews_are_decoded_where_the_vae_is(rank_pool):
    # If one rank decoded alone, it would wait for the others, or they would take its preview for the image.
    recipe = Recipe(str(find_tiny_flux()), mesh=(("ring", 2),), vae_placement="first")
    (first, sent), (_, none) = rank_pool.run(preview, 2, recipe)
    assert (sent, none) == (1, 0)
    assert np.abs(pixels(first) - plain_pixels()).max() <= 1


def cancel_after(step):
    """Return the step after which this rank stopped, and the bytes of a request after and before the cancelled one."""
    recipe = Recipe(str(find_tiny_flux()), mesh=(("ulysses", 2),), cache=0.05)
    pipe = build(recipe)
    done = []
    # Only the first rank knows that the request was cancelled.
    watch = Watch(done.append, lambda: dist.get_rank() == 0 and len(done) == step)
    before = generate(pipe, REQUEST, recipe)
    with pytest.raises(Cancelled, match=f"after step {step}"):
        generate(pipe, REQUEST, recipe, watch=watch)
    after = generate(pipe, REQUEST, recipe)
    return len(done), before and before.outputs, after and after.outputs


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [1, 3])
def test_all_ranks_stop_after_same_step(rank_pool, step):
    (first, before, after), (second, _, _) = rank_pool.run(cancel_after, 2, step)
    assert first == second == step
    assert before == after


@pytest.mark.long
def test_memory_is_weights_plus_share_of_pixels():
    recipe = Recipe(str(find_tiny_flux()))
    pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    modules = [module for module in pipe.components.values() if isinstance(module, torch.nn.Module)]
    weights = sum(x.numel() * 4 for module in modules for x in module.parameters())
    empty = without_weights(find_model(None), torch.float32)
    alone, halves = (predict_memory(empty, recipe, {"batch": 1, "ring": ranks, "ulysses": 1}, 1e9) for ranks in (1, 2))
    # In addition to the weights there are activations of 512 text tokens.
    assert weights < alone.fixed < weights + 512 * 8 * 128 * 4 * 10
    assert halves.per_pixel == pytest.approx(alone.per_pixel / 2, rel=1e-3)
    assert alone.bytes_of(alone.pixels) <= 1e9 < alone.bytes_of(alone.pixels + 1)
    assert [alone.problem(alone.pixels + more) is None for more in (0, 1)] == [True, False]
    placed = {"text_encoders": (pipe.text_encoder, pipe.text_encoder_2), "vae_placement": (pipe.vae,)}
    for option, modules in placed.items():
        first = replace(recipe, **{option: "first"})
        on_host = predict_memory(empty, first, {"batch": 1, "ring": 1, "ulysses": 1}, 1e9)
        waiting = sum(x.numel() * 4 for module in modules for x in module.parameters())
        assert alone.fixed - on_host.fixed == pytest.approx(waiting, rel=0.01)
    # The weights are loaded although they are predicted not to fit. The prediction is wrong here, and limits nothing.
    assert predict_memory(empty, recipe, {"batch": 1, "ring": 1, "ulysses": 1}, 1e3) is None


def test_missing_lora_file_raises(tmp_path):
    (tmp_path / "style.safetensors").touch()
    check_options_of_model(find_model(None), Recipe("", lora=(f"{tmp_path}/style.safetensors:0.5", "owner/name")))
    for name in (f"{tmp_path}/absent", "absent.safetensors:0.5", "owner/name.safetensors"):
        with pytest.raises(FileNotFoundError, match="owner/name"):
            check_options_of_model(find_model(None), Recipe("", lora=(name,)))


def test_a_lora_that_is_no_lora_is_named(tmp_path):
    (tmp_path / "style.safetensors").write_text("no weights")
    with pytest.raises(ValueError, match=r"lora '.*style\.safetensors' "):
        build(Recipe(str(find_tiny_flux()), lora=(f"{tmp_path}/style.safetensors:0.5",)))


def test_mesh_sizes_and_loras_are_read_from_texts():
    assert parse_mesh_sizes("batch=2, ring=4") == (("batch", 2), ("ring", 4))
    assert read_lora("style.safetensors:0.8") == ("style.safetensors", 0.8)
    assert read_lora("C:/style.safetensors") == ("C:/style.safetensors", 1.0)


def batch_and_lora(lora):
    """Return the first rank's images of two requests alone and as one batch, with a LoRA, and after it."""
    recipe = Recipe(str(find_tiny_flux()), mesh=(("ulysses", 2),))
    pipe = build(recipe)
    loras = LoadedLoras(pipe, recipe, 1, EncodedPrompts(pipe))
    requests = [REQUEST, Request({**FIELDS, "prompt": "a blue square"}, seed=4)]

    def run(requests):
        results = generate_batch(pipe, requests, recipe)
        return [] if results is None else [pixels(result) for result in results]

    alone = [*run(requests[:1]), *run(requests[1:])]
    together = run(requests)
    loras.use(Lora(lora, 0.5))
    changed = run(requests[:1])
    loras.use(None)
    return alone, together, changed, run(requests[:1])


def test_batches_and_loras_on_two_ranks(rank_pool, tmp_path):
    torch.manual_seed(0)
    pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    layers = get_peft_model_state_dict(pipe.transformer, adapter_name="default")
    # Random layers are scaled up until they change what the image shows.
    layers = {name: 3 * weight for name, weight in layers.items()}
    FluxPipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers, weight_name="a.safetensors")
    results = rank_pool.run(batch_and_lora, 2, str(tmp_path / "a.safetensors"))
    alone, together, changed, after = results[0]
    for single, batched in zip(alone, together, strict=True):
        assert np.abs(single - batched).max() <= 1
    assert np.abs(changed[0] - alone[0]).max() > 10
    assert np.array_equal(after[0], alone[0])
    assert results[1] == ([], [], [], [])
