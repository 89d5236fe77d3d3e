"""Modular pipelines on the ranks of a group: their inputs, and that the output equals that of one process."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ModularPipeline, TorchAoConfig
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image, ImageSequence
from safetensors.torch import save_file
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig

from para_core.adapters import cache_report
from para_core.fleet.build import build, find_model
from para_core.fleet.encode_first import EncodeFirst, encode_batches
from para_core.fleet.memory import foresee_mesh, predict_memory
from para_core.fleet.modular import call_modular, load_modular, open_modular
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe, check_options_of_model
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.without_weights import without_weights
from para_core.fleet.work import Watch, call_pipe, generate, generate_batch
from para_core.launcher.errors import Cancelled
from tests.modular_folders import plain_modular, save_modular
from zoo.tiny.pipelines.modular import MODULAR as TINY_MODULAR

SIZE = {"height": 48, "width": 80, "num_inference_steps": 2, "prompt": "a large red circle", "max_sequence_length": 64}
GUIDED = {**SIZE, "negative_prompt": "a blue square", "guidance_scale": 3.0}

VIDEO = {**GUIDED, "height": 96, "width": 160, "num_frames": 17}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function from a modular pipeline's name to its folder. Each pipeline is saved once."""
    root, saved = tmp_path_factory.mktemp("modular"), {}

    def folder(name):
        if name not in saved:
            saved[name] = save_modular(name, str(root / name))
        return saved[name]

    return folder


def pixels(images):
    return np.stack([np.asarray(image.convert("RGB")) for image in images]).astype(int)


def frames_of(result):
    return pixels(ImageSequence.Iterator(Image.open(io.BytesIO(result.outputs[0].data))))


def expected_pixels(folder, fields, output="images"):
    call = {name: value for name, value in fields.items() if name != "guidance_scale" or "flux" in folder}
    guidance = None if "flux" in folder else fields.get("guidance_scale")
    samples = plain_modular(folder, output, seed=3, guidance=guidance, **call)
    return pixels(samples if output == "images" else samples[0])


def run(pipe, fields):
    output = call_pipe(pipe, [Request(fields, seed=3)])
    return pixels(output.frames[0] if hasattr(output, "frames") else output.images)


def result_of(recipe, fields, format_):
    """Return the metadata of a result, its pixels, and those of a next request without a guidance scale."""
    pipe = build(recipe)
    result = generate(pipe, Request(fields, seed=3, delivery=Delivery(format_)), recipe)
    return result and result.metadata, run(pipe, fields), run(pipe, {**fields, "guidance_scale": None})


# -- One process.


def test_fields_are_inputs_of_blocks(folders):
    flux, qwen, ltx = (find_model(folders(name)) for name in ("flux", "qwen-image", "ltx"))
    assert (flux.pipeline, flux.kind, ltx.kind, ltx.modular) == ("FluxModularPipeline", "image", "video", True)
    assert flux.images == ("resized_image", "image")
    assert qwen.fields["guidance_scale"] == 4.0
    for field, value in (("negative_prompt", "b"), ("latents", [1.0]), ("timesteps", [1])):
        with pytest.raises(ValueError, match=f"FluxModularPipeline .*'{field}'"):
            make_request({"prompt": "a", field: value}, flux)
    with pytest.raises(ValueError, match=r"frames.*0"):
        make_request({"prompt": "a", "frames": 0}, ltx)
    assert make_request({**GUIDED, "n": 2}, qwen).results == 2


def test_input_image_is_required_where_blocks_need_it(tmp_path):
    index = {"_class_name": "Wan22Image2VideoModularPipeline", "_blocks_class_name": "Wan22Image2VideoBlocks"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    model = find_model(str(tmp_path))
    assert set(model.fields) >= {"guidance_scale", "guidance_scale_2"}
    with pytest.raises(ValueError, match=r"'image'.*Wan22Image2VideoModularPipeline"):
        make_request({"prompt": "a"}, model)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    assert make_request({"image": "a.png"}, model, read_image=lambda path: image.getvalue()).images


def test_options_without_a_method_are_refused(folders, tmp_path):
    flux = find_model(folders("flux"))
    with pytest.raises(ValueError, match=r"offload.*FluxModularPipeline"):
        check_options_of_model(flux, Recipe(flux.name, offload="model"))
    index = {"_class_name": "Cosmos3DistilledModularPipeline", "_blocks_class_name": "Cosmos3DistilledBlocks"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lora is 'a\.safetensors'.*Cosmos3DistilledModularPipeline"):
        check_options_of_model(find_model(str(tmp_path)), Recipe(str(tmp_path), lora=("a.safetensors",)))
    (tmp_path / "modular_model_index.json").write_text(json.dumps({"_class_name": "NoModularPipeline"}))
    with pytest.raises(ValueError, match="NoModularPipeline"):
        find_model(str(tmp_path))
    index = {"_class_name": "MiniMaxMusic3ModularPipeline", "_blocks_class_name": "MiniMaxMusic3Blocks"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="MiniMaxMusic3ModularPipeline"):
        find_model(str(tmp_path))


def test_own_code_runs_only_if_trusted(folders, tmp_path, monkeypatch):
    from diffusers.utils import dynamic_modules_utils

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = tmp_path / "own"
    own.mkdir()
    (own / "modular_model_index.json").write_text((Path(folders("flux")) / "modular_model_index.json").read_text())
    code = "from diffusers.modular_pipelines import FluxAutoBlocks\n\n\nclass OwnBlocks(FluxAutoBlocks):\n    pass\n"
    (own / "block.py").write_text(code)
    (own / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.OwnBlocks"}}))
    with pytest.raises(ValueError, match="--trust-remote-code"):
        find_model(str(own))
    assert not (tmp_path / "cache").exists()
    assert find_model(str(own), trust_remote_code=True).fields["num_inference_steps"] == 50
    assert any((tmp_path / "cache").rglob("block.py"))


def test_missing_weights_are_named(folders, tmp_path):
    index = json.loads((Path(folders("flux")) / "modular_model_index.json").read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"vae of model .*gone"):
        build(Recipe(str(tmp_path)))


def test_prompts_are_encoded_before_denoising(folders):
    recipe, order = Recipe(folders("flux")), EncodeFirst(call_pipe)
    pipe = build(recipe, order)
    lines = [Line(1, Request({**SIZE, "guidance_scale": 2.0}, seed=3)), Line(2, Request(SIZE, seed=4))]
    batches = encode_batches(lines, order)
    results = []
    for batch in batches:
        assert pipe.text_encoder_2.get_input_embeddings().weight.stride() == (0, 0)  # The weight was freed.
        results += [call_pipe(pipe, [line.request]).images for line in batch]
    assert np.array_equal(pixels(results[0]), expected_pixels(recipe.model, {**SIZE, "guidance_scale": 2.0}))


def test_batch_equals_single_requests(folders):
    recipe = Recipe(folders("flux"))
    pipe = build(recipe)
    requests = [Request({**SIZE, "prompt": prompt}, seed=seed) for seed, prompt in enumerate(("a", "a red circle"))]
    together = generate_batch(pipe, requests, recipe)
    for request, result in zip(requests, together, strict=True):
        alone = generate(pipe, request, recipe)
        assert np.abs(frames_of(result) - frames_of(alone)).max() <= 1


def test_mesh_and_memory_are_foreseen_without_weights(folders):
    model = find_model(folders("qwen-image"))
    recipe, pipe = Recipe(model.name), without_weights(model, torch.float32)
    assert pipe.transformer.device.type == "meta"
    assert foresee_mesh(pipe, recipe, 2) == {"batch": 2, "ring": 1, "ulysses": 1}
    modules = [x for x in build(recipe).components.values() if isinstance(x, torch.nn.Module)]
    weights = sum(x.numel() * 4 for module in modules for x in module.parameters())
    assert predict_memory(pipe, recipe, {"batch": 1, "ring": 1, "ulysses": 1}, 1e9).fixed > weights


# -- Two ranks.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("flux", {"mesh": (("ring", 2),), "vae": True}, {**SIZE, "guidance_scale": 2.0}),
        pytest.param("flux", {"weights": "fsdp"}, SIZE, marks=pytest.mark.long),
        pytest.param("qwen-image", {"mesh": (("batch", 2),)}, GUIDED, marks=pytest.mark.long),
        ("qwen-image", {"weights": "fsdp", "cache": 0.0}, GUIDED),
        pytest.param("flux", {"weights": "tensor", "mesh": (("tensor", 2),)}, SIZE, marks=pytest.mark.long),
        pytest.param("flux", {"offload": "blocks", "text_encoders": "first"}, SIZE, marks=pytest.mark.long),
        ("ltx", {"mesh": (("ulysses", 2),)}, VIDEO),
    ],
)
@pytest.mark.long
def test_each_recipe_equals_modular_pipeline_alone(rank_pool, folders, name, options, fields):
    folder, output = folders(name), "videos" if name == "ltx" else "images"
    results = rank_pool.run(result_of, 2, Recipe(folder, **options), fields, "gif" if name == "ltx" else "png")
    unguided = {name: value for name, value in fields.items() if name != "guidance_scale"}
    expected = [expected_pixels(folder, call, output) for call in (fields, unguided)]
    for metadata, *images in results:
        assert max(np.abs(x - y).max() for x, y in zip(images, expected, strict=True)) <= 1
        assert metadata is None or metadata["mesh"].items() >= dict(options.get("mesh", ())).items()
    assert [metadata is None for metadata, *_ in results] == [False, True]


def cancelled_after(folder, step):
    """Return the step after which this rank stopped, and whether the next request is as if none had been cancelled."""
    recipe = Recipe(folder, mesh=(("ulysses", 2),), cache=0.05)
    pipe, done = build(recipe), []
    request = Request({**SIZE, "num_inference_steps": 4}, seed=3)
    watch = Watch(done.append, lambda: dist.get_rank() == 0 and len(done) == step)
    before = call_pipe(pipe, [request]).images[0].tobytes()
    assert cache_report(pipe).rows
    with pytest.raises(Cancelled, match=f"after step {step}"):
        generate(pipe, request, recipe, watch=watch)
    return len(done), call_pipe(pipe, [request]).images[0].tobytes() == before


def test_all_ranks_stop_after_same_step(rank_pool, folders):
    assert rank_pool.run(cancelled_after, 2, folders("flux"), 2) == [(2, True)] * 2


# -- Changes of weights, in one process.


def test_lora_equals_pipeline_alone(folders, tmp_path):
    folder, style = folders("flux"), tmp_path / "style.safetensors"
    plain = ModularPipeline.from_pretrained(folder)
    plain.load_components(dtype=torch.float32)
    torch.manual_seed(0)
    plain.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    weights = {f"transformer.{name}": x for name, x in get_peft_model_state_dict(plain.transformer).items()}
    save_file({name: x.contiguous() for name, x in weights.items()}, style)
    expected = pixels(plain(output="images", generator=torch.Generator().manual_seed(3), **SIZE))
    assert np.abs(expected - expected_pixels(folder, SIZE)).max() > 2
    recipe = Recipe(folder, lora=(str(style),))
    check_options_of_model(find_model(folder), recipe)
    assert np.array_equal(pixels(call_pipe(build(recipe), [Request(SIZE, seed=3)]).images), expected)


def test_transformer_is_quantized_as_by_diffusers(folders):
    plain = ModularPipeline.from_pretrained(folders("flux"))
    config = TorchAoConfig(Int8WeightOnlyConfig())
    plain.load_components(dtype=torch.float32, quantization_config={"transformer": config})
    expected = pixels(plain(output="images", generator=torch.Generator().manual_seed(3), **SIZE))
    assert not np.array_equal(expected, expected_pixels(folders("flux"), SIZE))
    images = call_pipe(build(Recipe(folders("flux"), quantize="int8")), [Request(SIZE, seed=3)]).images
    assert np.abs(pixels(images) - expected).max() <= 1


class Layered:
    """A modular pipeline that generates several layers for each image, like QwenImageLayered."""

    def __init__(self, pipe):
        self._blocks, self.components = pipe._blocks, {}

    def __call__(self, output, **fields):
        return [["first", "second"], ["third"]]


def test_layers_of_an_image_are_results_of_their_own(folders):
    pipe = Layered(open_modular(folders("qwen-image")))
    assert call_modular(pipe, {"prompt": "a"}).images == ["first", "second", "third"]


def test_transformers_of_any_name_are_quantized_as_by_diffusers(tmp_path):
    folder, names = str(tmp_path / "h3"), ("transformer", "transformer_ref")
    TINY_MODULAR["MiniMaxH3"].build().save_pretrained(folder, overwrite_modular_index=True)
    plain = ModularPipeline.from_pretrained(folder)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    plain.load_components(dtype=torch.float32, quantization_config=dict.fromkeys(names, config))
    pipe = load_modular(folder, dtype=torch.float32, quantize="int8")
    for name in names:
        weights, expected = (quantized_weights(getattr(x, name)) for x in (pipe, plain))
        assert weights.keys() == expected.keys() != set()
        assert all(torch.equal(x, expected[path]) for path, x in weights.items())


def quantized_weights(module):
    return {path: x.dequantize() for path, x in module.named_parameters() if isinstance(x, Int8Tensor)}


@pytest.mark.long
def test_whole_transformer_is_compiled(folders):
    images = call_pipe(build(Recipe(folders("flux"), compile="whole")), [Request(SIZE, seed=3)]).images
    assert np.abs(pixels(images) - expected_pixels(folders("flux"), SIZE)).max() <= 1
