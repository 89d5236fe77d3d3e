"""Models that are single files, other classes for the same weights, and ControlNets: found, described and loaded."""

import json
from functools import partial
from typing import get_args

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline, FluxImg2ImgPipeline, FluxTransformer2DModel
from diffusers.loaders import single_file_model
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save, save_file

from para_core.fleet.build import build, find_model
from para_core.fleet.classical import check_ranks
from para_core.fleet.model_files import read_index
from para_core.fleet.pipeline_info import describe_class, find_tiny_flux
from para_core.fleet.pipeline_source import find_fitting_pipelines, read_pipeline
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request
from para_core.fleet.selection import pipelines_for, select_pipeline
from para_core.fleet.without_weights import without_weights
from tests.scripts import as_program
from tests.weights.hub import REPOSITORY, Hub
from tests.weights.pipes import write_gguf
from zoo.tiny.pipelines.unet import stable_diffusion

FLUX = str(find_tiny_flux())
CALL = {"prompt": "a blue square", "num_inference_steps": 2, "height": 32, "width": 48, "max_sequence_length": 16}


@pytest.fixture(scope="module")
def transformer():
    return FluxTransformer2DModel.from_pretrained(FLUX, subfolder="transformer")


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory, transformer):
    path = tmp_path_factory.mktemp("files") / "flux.safetensors"
    save_file(transformer.state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def controlnet(tmp_path_factory, transformer):
    folder = str(tmp_path_factory.mktemp("controlnet"))
    torch.manual_seed(0)
    sizes = {name: transformer.config[name] for name in ("attention_head_dim", "num_attention_heads")}
    net = FluxControlNetModel.from_transformer(transformer, num_layers=1, num_single_layers=1, **sizes)
    for parameter in net.parameters():
        if not parameter.any():  # the projections, without which the ControlNet changes nothing
            torch.nn.init.normal_(parameter, std=0.1)
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stable_diffusion_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sd"))
    stable_diffusion("StableDiffusionPipeline").save_pretrained(folder)
    return folder


def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8))


def pixels(pipe, **call):
    return np.asarray(pipe(generator=torch.Generator().manual_seed(3), output_type="np", **{**CALL, **call}).images)


def same_weights(module, other):
    weights, others = module.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def draw_on_rank(recipes, calls):
    return [pixels(build(recipe), **call) for recipe, call in zip(recipes, calls, strict=True)]


def test_other_class_and_controlnet_on_ranks_equal_diffusers(rank_pool, controlnet):
    nets = [FluxControlNetModel.from_pretrained(controlnet) for _ in range(2)]
    edit = FluxImg2ImgPipeline.from_pretrained(FLUX, dtype=torch.float32)
    control = FluxControlNetPipeline.from_pretrained(FLUX, controlnet=nets, dtype=torch.float32)
    calls = [
        {"image": picture(), "strength": 0.9},
        {"control_image": [picture()] * 2, "controlnet_conditioning_scale": [0.5, 0.2]},
        {"control_image": picture(), "controlnet_conditioning_scale": 0.5},
    ]
    single = FluxControlNetPipeline.from_pretrained(FLUX, controlnet=nets[0], dtype=torch.float32)
    expected = [pixels(pipe, **call) for pipe, call in zip((edit, control, single), calls, strict=True)]
    assert np.abs(expected[2] - expected[1]).max() > 0.01
    controlled = [Recipe(FLUX, "FluxControlNetPipeline", controlnet=(controlnet,) * n) for n in (2, 1)]
    recipes = [Recipe(FLUX, "FluxImg2ImgPipeline"), *controlled]
    for rank, images in enumerate(rank_pool.run(draw_on_rank, 2, recipes, calls)):
        assert max(np.abs(x - y).max() for x, y in zip(images, expected, strict=True)) < 1e-4, f"rank {rank}"


def test_file_of_a_transformer_equals_its_folder(safetensors_file):
    pipe = build(Recipe(safetensors_file, config=FLUX, pipeline="FluxImg2ImgPipeline"))
    plain = build(Recipe(FLUX, pipeline="FluxImg2ImgPipeline"))
    assert type(pipe) is type(plain) is FluxImg2ImgPipeline
    assert same_weights(pipe.transformer, plain.transformer)
    # Weights of a mapped file are not aligned, so a kernel may sum them in another order.
    call = {"image": picture(), "strength": 0.9}
    assert np.abs(pixels(pipe, **call) - pixels(plain, **call)).max() < 1e-4


def test_gguf_file_stays_packed_and_is_close_to_its_folder(tmp_path, transformer):
    write_gguf(transformer, str(tmp_path / "flux.gguf"))
    pipe = build(Recipe(str(tmp_path / "flux.gguf"), config=FLUX))
    assert type(pipe.transformer.hf_quantizer).__name__ == "GGUFQuantizer"
    assert 0 < np.abs(pixels(pipe) - pixels(build(Recipe(FLUX)))).max() < 0.1


@pytest.mark.slow
@pytest.mark.long
def test_configs_of_a_repository_complete_a_file(monkeypatch, safetensors_file, tmp_path):
    """Everything but the weights of the transformer is downloaded."""
    arguments = ["generate", "--model", safetensors_file, "--config", REPOSITORY, "--prompt", "a", "--steps", "1"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with Hub(find_tiny_flux()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        as_program("-m", "para_core", *arguments, "--size", "32x32", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out/00001.png").is_file()
    weights = {name.partition("/")[0] for name in hub.downloaded if name.endswith(".safetensors")}
    assert weights == {"vae", "text_encoder", "text_encoder_2"}
    assert hub.downloaded.count("model_index.json") == 1


def test_cached_modular_repository_is_found_offline(monkeypatch, tmp_path):
    repository = tmp_path / "models--someone--flux"
    for file, text in (("refs/main", "0123"), ("snapshots/0123/modular_model_index.json", "{}")):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_index("someone/flux").modular


def strip(prefix, checkpoint, **_):
    return {name.removeprefix(prefix): x for name, x in checkpoint.items() if name.startswith(prefix)}


@pytest.mark.parametrize("with_encoder", [True, False])
def test_file_of_a_whole_pipeline_equals_its_folder(monkeypatch, stable_diffusion_folder, tmp_path, with_encoder):
    plain = diffusers.DiffusionPipeline.from_pretrained(stable_diffusion_folder)
    file, weights = tmp_path / "sd.safetensors", {}
    # The file has diffusers' own names of layers below the prefixes of the original code.
    for part, prefix in ((plain.unet, "model.diffusion_model."), (plain.vae, "first_stage_model.")):
        weights |= {prefix + name: x for name, x in part.state_dict().items()}
        loadable = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[type(part).__name__]
        monkeypatch.setitem(loadable, "checkpoint_mapping_fn", partial(strip, prefix))
    clip = "cond_stage_model.transformer.text_model."
    if with_encoder:  # else it is that of the configs
        weights |= {clip + name.removeprefix("text_model."): x for name, x in plain.text_encoder.state_dict().items()}
    save_file({name: x.contiguous().clone() for name, x in weights.items()}, file)
    other = None if with_encoder else "StableDiffusionImg2ImgPipeline"
    pipe = build(Recipe(str(file), config=stable_diffusion_folder, pipeline=other))
    assert type(pipe).__name__ == (other or "StableDiffusionPipeline")
    for name in ("unet", "vae", "text_encoder"):
        assert same_weights(getattr(pipe, name), getattr(plain, name)), name


def test_images_that_a_class_needs_follow_from_its_name():
    masked = ("image", "mask_image")
    needed = {"": (), "Img2Img": ("image",), "Inpaint": masked, "Fill": masked, "Control": ("control_image",)}
    assert {name: find_model(FLUX, pipeline=f"Flux{name}Pipeline").required for name in needed} == needed


def test_sources_describe_the_calls_of_the_classes():
    names = ("FluxControlNet", "Flux2KleinInpaint", "HunyuanDiT", "SanaVideo", "UniDiffuser", "AmusedImg2Img")
    for name in [f"{name}Pipeline" for name in (*names, "StableDiffusionXLInpaint")]:
        cls = getattr(diffusers, name)
        source = read_pipeline(name)
        imported = describe_class("", cls, {})
        assert {key: source.call[key] for key in imported.fields} == imported.fields
        assert set(source.required) <= {*cls._get_signature_keys(cls)[0]}
        types = {key: {*get_args(annotation)} for key, annotation in imported.annotations.items()}
        assert {torch.Tensor, type(None)} not in types.values()
        assert {key for key, kinds in types.items() if Image.Image in kinds} == {*imported.images}


def test_classes_that_fit_are_those_of_the_same_parts(stable_diffusion_folder):
    names = {source.name for source in find_fitting_pipelines(read_index(FLUX).content)}
    assert {"FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxControlNetPipeline"} <= names
    assert not {"QwenImagePipeline", "StableDiffusionPipeline", "Flux2Pipeline"} & names
    names = [source.name for source in find_fitting_pipelines(read_index(stable_diffusion_folder).content)]
    assert names[0] == "StableDiffusionPipeline"
    assert {"StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline"} <= {*names}
    assert not {"StableDiffusionXLPipeline", "KolorsPipeline", "IFPipeline"} & {*names}
    # FluxFillPipeline, FluxControlPipeline and FluxKontextPipeline have the same classes, but other weights.
    assert pipelines_for(FLUX, images=True) == ["FluxImg2ImgPipeline", "FluxInpaintPipeline"]
    assert pipelines_for(FLUX, images=False) == ["FluxPipeline"]


def test_controlnet_counts_for_memory_and_must_fit(controlnet, stable_diffusion_folder):
    pipe = without_weights(find_model(FLUX, pipeline="FluxControlNetPipeline", controlnet=[controlnet]), torch.float32)
    assert next(pipe.controlnet.parameters()).is_meta
    with pytest.raises(ValueError, match=r"controlnet .* FluxPipeline takes no ControlNet; .*FluxControlNetPipeline"):
        select_pipeline(FLUX, controlnet=[controlnet])
    with pytest.raises(ValueError, match="a FluxControlNetModel; expected a ControlNetModel"):
        select_pipeline(stable_diffusion_folder, pipeline="StableDiffusionControlNetPipeline", controlnet=[controlnet])


def find(tmp_path, name, **components):
    index = {"_class_name": name, **{part: ["diffusers", cls] for part, cls in components.items()}}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return find_model(str(tmp_path))


def test_pipeline_that_cannot_run_is_refused_by_its_index(tmp_path):
    for name, part, cls in (("DDPM", "unet", "UNet2DModel"), ("Lumina", "transformer", "LuminaNextDiT2DModel")):
        with pytest.raises(TypeError, match=rf"{cls} .*(not tried yet|because)"):
            find(tmp_path, f"{name}Pipeline", **{part: cls})
    check_ranks(find_model(FLUX, pipeline="FluxImg2ImgPipeline"), 2)
    # Perturbed attention runs on one rank.
    model = find(tmp_path, "StableDiffusion3PAGPipeline", transformer="SD3Transformer2DModel")
    check_ranks(model, 1)
    with pytest.raises(TypeError, match=r"ranks is 2.*StableDiffusion3PAGPipeline"):
        check_ranks(model, 2)


# Of peft, kohya-ss, XLabs, diffusers before peft, and LyCORIS.
LORAS = "x.lora_A.weight lora_x.alpha proj_lora1.down.weight to_q_lora.down.weight lycoris_x.diff x.lokr_w1 x.hada_w1_a"


@pytest.mark.parametrize(
    ("name", "contents", "named"),
    [
        ("a.safetensors", b"\xff" * 20, "no safetensors file"),
        ("a.safetensors", b"\x02" + bytes(7) + b"{", "no safetensors file"),
        ("a.safetensors", b"\x02" + bytes(7) + b"{}", "no weights"),
        *[("a.safetensors", save({name: torch.zeros(1)}), "LoRA") for name in LORAS.split()],
        ("a.gguf", b"GGML", "no GGUF file"),
    ],
)
def test_damaged_file_and_lora_are_refused(tmp_path, name, contents, named):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=named):
        select_pipeline(str(tmp_path / name), config=FLUX)


def test_size_that_the_pipeline_would_round_is_refused():
    model = find_model(None)
    with pytest.raises(ValueError, match=r"size is 40x24.* 32x16 or 48x32"):
        make_request({"prompt": "a", "size": "40x24"}, model)
    with pytest.raises(ValueError, match=r"'width' is 5.* expected 16\."):
        make_request({"prompt": "a", "width": 5}, model)
    with pytest.raises(ValueError, match="takes no width and height"):
        make_request({"prompt": "a", "size": "64x64"}, describe_class("", diffusers.StableDiffusionImg2ImgPipeline, {}))
