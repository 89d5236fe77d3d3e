"""Modular pipelines: their inputs, and that one process and ranks give the output of diffusers."""

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
from PIL import Image
from safetensors.torch import save_file
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig

from para_core.adapters import cache_report
from para_core.fleet.build import build, find_model
from para_core.fleet.modular import call_modular, load_modular, open_modular
from para_core.fleet.recipe import Recipe, check_options_of_model
from para_core.fleet.request import Request, make_request
from para_core.fleet.work import Watch, call_pipe, generate
from para_core.launcher.errors import Cancelled
from tests.modular_folders import plain_modular, save_modular
from zoo.tiny.pipelines.modular import MODULAR as TINY_MODULAR

SIZE = {"height": 48, "width": 80, "num_inference_steps": 2, "prompt": "a large red circle", "max_sequence_length": 64}
GUIDED = {**SIZE, "negative_prompt": "a blue square", "guidance_scale": 3.0}


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


def expected_pixels(folder, fields):
    return pixels(plain_modular(folder, "images", seed=3, **fields))


# -- One process.


def find(tmp_path, name, blocks):
    """Return the description of a folder whose index names a class and its blocks."""
    index = {"_class_name": f"{name}ModularPipeline", "_blocks_class_name": blocks}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    return find_model(str(tmp_path))


def test_fields_are_inputs_of_blocks(folders, tmp_path):
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
    wan = find(tmp_path, "Wan22Image2Video", "Wan22Image2VideoBlocks")
    assert set(wan.fields) >= {"guidance_scale", "guidance_scale_2"}
    with pytest.raises(ValueError, match=r"'image'.*Wan22Image2VideoModularPipeline"):
        make_request({"prompt": "a"}, wan)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    assert make_request({"image": "a.png"}, wan, read_image=lambda path: image.getvalue()).images


def test_options_without_a_method_and_unknown_blocks_are_refused(folders, tmp_path):
    flux = find_model(folders("flux"))
    with pytest.raises(ValueError, match=r"offload.*FluxModularPipeline"):
        check_options_of_model(flux, Recipe(flux.name, offload="model"))
    cosmos = find(tmp_path, "Cosmos3Distilled", "Cosmos3DistilledBlocks")
    with pytest.raises(ValueError, match=r"lora is 'a\.safetensors'.*Cosmos3DistilledModularPipeline"):
        check_options_of_model(cosmos, Recipe(str(tmp_path), lora=("a.safetensors",)))
    for name, blocks in (("No", None), ("MiniMaxMusic3", "MiniMaxMusic3Blocks")):
        with pytest.raises(ValueError, match=f"{name}ModularPipeline"):
            find(tmp_path, name, blocks)


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


# -- Two ranks.


def cancelled_after(folder, step):
    """Return the number of steps of a cancelled request, and the bytes of another one before and after it."""
    recipe = Recipe(folder, mesh=(("ulysses", 2),), cache=0.0, vae=True)
    pipe, done = build(recipe), []
    watch = Watch(done.append, lambda: dist.get_rank() == 0 and len(done) == step)
    before = call_pipe(pipe, [Request(SIZE, seed=3)]).images
    assert cache_report(pipe).rows
    with pytest.raises(Cancelled, match=f"after step {step}"):
        generate(pipe, Request({**SIZE, "num_inference_steps": 4}, seed=3), recipe, watch=watch)
    return len(done), pixels(before), pixels(call_pipe(pipe, [Request(SIZE, seed=3)]).images)


def test_all_ranks_stop_after_same_step(rank_pool, folders):
    for steps, before, after in rank_pool.run(cancelled_after, 2, folders("flux"), 2):
        assert steps == 2
        assert np.array_equal(before, after)
        assert np.abs(before - expected_pixels(folders("flux"), SIZE)).max() <= 1


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


def test_layers_of_an_image_are_results_of_their_own(folders, monkeypatch):
    pipe = open_modular(folders("qwen-image"))
    # A pipeline that generates several layers for each image, like QwenImageLayered.
    monkeypatch.setattr(type(pipe), "__call__", lambda self, output, **fields: [["first", "second"], ["third"]])
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
