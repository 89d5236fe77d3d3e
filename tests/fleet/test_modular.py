"""Modular pipelines in one process: their inputs and refusals, and the images of diffusers with a LoRA."""

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file

from para_core.fleet import build as build_module
from para_core.fleet.build import build, build_unmodified, find_model
from para_core.fleet.outputs import encode
from para_core.fleet.recipe import Recipe, check_options_of_model
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.without_weights import without_weights
from para_core.fleet.work import call_pipe
from tests.modular_folders import plain_modular, save_modular

SIZE = {"height": 48, "width": 80, "num_inference_steps": 2, "prompt": "a large red circle", "max_sequence_length": 64}


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
    assert make_request({**SIZE, "negative_prompt": "b", "guidance_scale": 3.0, "n": 2}, qwen).results == 2
    wan = find(tmp_path, "Wan22Image2Video", "Wan22Image2VideoBlocks")
    assert set(wan.fields) >= {"guidance_scale", "guidance_scale_2"}
    with pytest.raises(ValueError, match=r"'image'.*Wan22Image2VideoModularPipeline"):
        make_request({"prompt": "a"}, wan)
    (output,) = encode([Image.new("RGB", (8, 8))], Delivery())
    assert make_request({"image": "a.png"}, wan, read_image=lambda path: output.data).images


def test_options_without_a_method_and_unknown_blocks_are_refused(folders, tmp_path, monkeypatch):
    flux = find_model(folders("flux"))
    # The reference of a comparison needs no such method.
    monkeypatch.setattr(build_module, "_device_type", lambda: "cuda")
    with mock.patch.object(build_module, "_place_components") as placed:
        build_unmodified(Recipe(flux.name, offload="blocks"))
    assert placed.call_args.args[1].offload is None
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
    model = find_model(str(own), trust_remote_code=True)
    assert model.fields["num_inference_steps"] == 50
    assert type(without_weights(model, torch.float32)._blocks).__name__ == "OwnBlocks"
    assert any((tmp_path / "cache").rglob("block.py"))


def test_missing_weights_are_named(folders, tmp_path):
    index = json.loads((Path(folders("flux")) / "modular_model_index.json").read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"vae of model .*gone"):
        build(Recipe(str(tmp_path)))


def test_lora_equals_pipeline_alone(folders, tmp_path):
    folder, style = folders("flux"), tmp_path / "style.safetensors"
    plain = ModularPipeline.from_pretrained(folder)
    plain.load_components(dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    plain.transformer.add_adapter(config)
    weights = {f"transformer.{name}": x for name, x in get_peft_model_state_dict(plain.transformer).items()}
    save_file({name: x.contiguous() for name, x in weights.items()}, style)
    expected = pixels(plain(output="images", generator=torch.Generator().manual_seed(3), **SIZE))
    assert np.abs(expected - pixels(plain_modular(folder, "images", seed=3, **SIZE))).max() > 2
    recipe = Recipe(folder, lora=(str(style),))
    check_options_of_model(find_model(folder), recipe)
    assert np.array_equal(pixels(call_pipe(build(recipe), [Request(SIZE, seed=3)]).images), expected)


def test_scale_of_the_guider_is_that_of_each_request_and_every_step_is_told(folders):
    folder, call, steps = folders("qwen-image"), {**SIZE, "negative_prompt": "b"}, []
    pipe = build(Recipe(folder))
    for scale in (9.0, None):
        request = Request({**call, "guidance_scale": scale}, seed=3)
        images = call_pipe(pipe, [request], callback_on_step_end=lambda pipe, step, *_: steps.append(step)).images
        assert np.array_equal(pixels(images), pixels(plain_modular(folder, "images", seed=3, guidance=scale, **call)))
    assert steps == [0, 1] * 2
