"""A request on the ranks of a group, without Ray: ways to put a pipeline on them, stopping together, and results."""

import io
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxImg2ImgPipeline
from PIL import Image

from para_core.fleet.build import build, build_unmodified, dtype_of, find_model
from para_core.fleet.failures import EncodingFailed
from para_core.fleet.memory import foresee_mesh, predict_memory
from para_core.fleet.outputs import encode
from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, describe_class, find_tiny_flux
from para_core.fleet.recipe import Recipe, check_options_of_model, read_lora
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.without_weights import without_weights
from para_core.fleet.work import Watch, generate_batch, generate_request
from para_core.launcher.errors import Cancelled
from para_core.plans.region import region_of
from tests.tiny import load_pipe

FIELDS = {**TINY_FLUX_FIELDS, "height": 48, "width": 64, "num_inference_steps": 4, "prompt": "a large red circle"}
REQUEST = Request(FIELDS, seed=3)
FLUX = str(find_tiny_flux())


@pytest.fixture(scope="module")
def plain():
    """Return diffusers' own pipeline, and the pixels of the request."""
    pipe = load_pipe(FLUX)
    return pipe, np.asarray(pipe(generator=torch.Generator().manual_seed(3), **FIELDS).images[0]).astype(int)


def pixels(data):
    data = data if isinstance(data, bytes) else data.outputs[0].data
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def result_of(recipe):
    pipe = build(recipe)
    return generate_request(pipe, REQUEST, recipe), region_of(pipe.transformer).options.rotate_method


def test_recipe_equals_plain_pipeline(rank_pool, plain):
    recipe = Recipe(FLUX, mesh=(("ring", 2),), weights="fsdp", rotate_method="2d", vae=True)
    (first, method), (second, _) = rank_pool.run(result_of, 2, recipe)
    assert (second, method) == (None, "2d")
    mesh = {"batch": 1, "ring": 2, "ulysses": 1}
    assert first.metadata["mesh"] == mesh
    assert foresee_mesh(without_weights(find_model(None), dtype_of(recipe)), recipe, 2) == mesh
    assert np.abs(pixels(first) - plain[1]).max() <= 1


def test_components_are_offloaded_from_the_gpu_of_their_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("para_core.fleet.build._device_type", lambda: "cuda")
    for options in ({"text_encoders": "first", "vae_placement": "first"}, {"offload": "blocks"}):
        pipe = build_unmodified(Recipe(FLUX, dtype="float32", **options))
        assert pipe._offload_device == torch.device("cuda", 1)  # without an index diffusers takes the first GPU


def preview_and_cancel():
    """Return the result and the number of partial images that this rank sends, and the steps of cancelled requests."""
    # If one rank decoded a preview alone, it would wait for the others, or they would take it for the image.
    recipe = Recipe(FLUX, mesh=(("ring", 2),), vae_placement="first", cache=0.0)
    pipe, previews, steps = build(recipe), [], []
    request = replace(REQUEST, delivery=Delivery("png", partial_images=1))
    first = generate_request(pipe, request, recipe, watch=Watch(preview=previews.append))
    for step in (1, 3):
        done = []
        # Only the first rank knows that the request was cancelled.
        watch = Watch(done.append, lambda step=step, done=done: dist.get_rank() == 0 and len(done) == step)
        with pytest.raises(Cancelled, match=f"after step {step}"):
            generate_request(pipe, REQUEST, recipe, watch=watch)
        steps.append(len(done))
    after = generate_request(pipe, REQUEST, recipe)
    return first, after, len(previews), steps


def test_all_ranks_decode_previews_and_stop_after_the_same_step(rank_pool, plain):
    (first, after, previews, steps), (_, _, *second) = rank_pool.run(preview_and_cancel, 2)
    assert ([previews, steps], second) == ([1, [1, 3]], [0, [1, 3]])
    assert np.abs(pixels(first) - plain[1]).max() <= 1
    assert np.array_equal(pixels(after), pixels(first))


def test_memory_is_weights_plus_share_of_pixels(plain):
    recipe, pipe = Recipe(FLUX), plain[0]
    modules = [module for module in pipe.components.values() if isinstance(module, torch.nn.Module)]
    weights = sum(x.numel() * 4 for module in modules for x in module.parameters())
    empty = without_weights(find_model(None), torch.float32)

    def predict(recipe, ring=1, room=1e9):
        return predict_memory(empty, recipe, {"batch": 1, "ring": ring, "ulysses": 1}, room)

    alone, halves = predict(recipe), predict(recipe, ring=2)
    # In addition to the weights there are activations of 512 text tokens.
    assert weights < alone.fixed < weights + 512 * 8 * 128 * 4 * 10
    assert halves.per_pixel == pytest.approx(alone.per_pixel / 2, rel=1e-3)
    assert alone.bytes_of(alone.pixels) <= 1e9 < alone.bytes_of(alone.pixels + 1)
    assert [alone.problem(alone.pixels + more) is None for more in (0, 1)] == [True, False]
    placed = {"text_encoders": (pipe.text_encoder, pipe.text_encoder_2), "vae_placement": (pipe.vae,)}
    for option, modules in placed.items():
        on_host = predict(replace(recipe, **{option: "first"}))
        waiting = sum(x.numel() * 4 for module in modules for x in module.parameters())
        assert alone.fixed - on_host.fixed == pytest.approx(waiting, rel=0.01)
    # The weights are loaded although they are predicted not to fit. The prediction is wrong here, and limits nothing.
    assert predict(recipe, room=1e3) is None


def test_loras_are_read_and_missing_or_broken_files_raise(tmp_path):
    (tmp_path / "style.safetensors").write_text("no weights")
    check_options_of_model(find_model(None), Recipe("", lora=(f"{tmp_path}/style.safetensors:0.5", "owner/name")))
    for name in (f"{tmp_path}/absent", "absent.safetensors:0.5", "owner/name.safetensors"):
        with pytest.raises(FileNotFoundError, match="owner/name"):
            check_options_of_model(find_model(None), Recipe("", lora=(name,)))
    with pytest.raises(ValueError, match=r"lora '.*style\.safetensors' "):
        build(Recipe(FLUX, lora=(f"{tmp_path}/style.safetensors:0.5",)))
    assert read_lora("C:/style.safetensors") == ("C:/style.safetensors", 1.0)


def test_results_of_one_request_are_those_of_their_own_seeds(plain):
    recipe = Recipe(FLUX)
    edits, image = load_pipe(FLUX, FluxImg2ImgPipeline), encode([Image.new("RGB", (64, 48), "red")], Delivery())[0].data
    fields = {"prompt": "a large red circle", "size": "64x48", "steps": 4}
    # With this strength four of eight steps are done, for each image.
    edit = {"image": "a.png", "max_sequence_length": 16, "strength": 0.5, "steps": 8}
    for pipe, model, call, count in (
        (plain[0], find_model(None), fields, 4),
        (edits, describe_class("", FluxImg2ImgPipeline, {}), {**fields, **edit}, 8),
    ):
        steps, previews = [], []
        watch = Watch(steps.append, preview=previews.append)

        def draw(pipe=pipe, model=model, call=call, watch=watch, **others):
            request = make_request({**call, **others}, model, read_image=lambda _: image)
            return generate_request(pipe, replace(request, delivery=Delivery(partial_images=1)), recipe, watch)

        together = draw(n=2, seed=3)
        assert steps == [*range(1, count + 1)]
        # It is of the first image.
        (preview,) = previews
        assert np.abs(pixels(preview.data) - pixels(together)).mean() < 8
        assert together.metadata["seeds"] == [3, 4]
        assert [output.suffix for output in together.outputs] == ["-0.png", "-1.png"]
        for output, seed in zip(together.outputs, (3, 4), strict=True):
            assert np.abs(pixels(output.data) - pixels(draw(seed=seed))).max() <= 1
        assert np.abs(pixels(together.outputs[0].data) - pixels(together.outputs[1].data)).max() > 1


def test_layers_with_transparency_are_files_of_one_size():
    class Layers:
        vae = SimpleNamespace(config=SimpleNamespace(input_channels=4))

        def __call__(self, image, **arguments):
            assert image.mode == "RGBA"
            return SimpleNamespace(images=[[image, Image.new("RGBA", (64, 48), "blue")]])

    images = {"image": (encode([Image.new("RGBA", (64, 48), (255, 0, 0, 0))], Delivery())[0].data,)}
    for format_, first in (("png", (255, 0, 0, 0)), ("jpg", (255, 255, 255))):
        request = replace(REQUEST, images=images, delivery=Delivery(format_))
        result = generate_request(Layers(), request, Recipe(FLUX))
        corners = [tuple(pixels(output.data)[0, 0]) for output in result.outputs]
        assert corners[0] == first and corners[1][2] > 250 and result.metadata["size"] == "64x48"


def test_result_that_cannot_be_encoded_fails_its_request_only(monkeypatch, tmp_path):
    def pipe(**arguments):
        return SimpleNamespace(images=[Image.new("RGB", (64, 48))] * 2)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    requests = [replace(REQUEST, delivery=Delivery(format_)) for format_ in ("mp4", "png")]
    failed, result = generate_batch(pipe, requests, Recipe(FLUX))
    assert isinstance(failed, EncodingFailed) and "absent" in str(failed)
    for output, reason in ((SimpleNamespace(images=[1]), "1 samples for 2 requests"), (object(), "'images'")):
        outcomes = generate_batch(lambda output=output, **_: output, requests, Recipe(FLUX))
        assert [isinstance(outcome, EncodingFailed) and reason in str(outcome) for outcome in outcomes] == [True] * 2
    images = {"image": (result.outputs[0].data,)}
    parts = replace(requests[0], fields={**FIELDS, "num_images_per_prompt": 2}, images=images)
    assert isinstance(generate_request(pipe, parts, Recipe(FLUX)), EncodingFailed)


def test_webp_loses_no_pixel_and_mp4_no_row():
    layers = Image.fromarray(np.random.default_rng(0).integers(0, 2, (16, 16, 4), dtype=np.uint8) * 255)
    for image in (layers, layers.convert("RGB")):
        assert np.array_equal(pixels(encode([image], Delivery("webp"))[0].data), np.asarray(image))
    sizes = [len(encode([[image] * 2], Delivery("webp", quality=quality))[0].data) for quality in (5, 95)]
    assert sizes[0] < sizes[1]
    gifs = [encode([[image, image.rotate(90)]], Delivery("gif", fps))[0].data for fps in (8, 15, 60)]
    assert [Image.open(io.BytesIO(data)).info["duration"] for data in gifs] == [120, 70, 20]
    pytest.importorskip("imageio_ffmpeg")
    (video,) = encode([[image.resize((72, 40))] * 2], Delivery("mp4"))
    assert bytes([0, 72, 0, 0, 0, 40, 0, 0]) in video.data  # the sides in the header of the track
