"""``para_core plan`` and ``para_core doctor`` print what the library finds."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from diffusers import FluxPipeline

from para_core.adapters import plan_mesh
from para_core.adapters.planner.inputs import HIDDEN_SHAPES
from para_core.adapters.planner.weights import default_text_encoders
from para_core.cli.app import run
from para_core.fleet.pipeline_info import find_tiny_flux
from zoo.tiny.pipelines.unet import UNET_PIPELINES


def test_json_has_every_mesh(capsys):
    assert run(["plan", "--ranks", "4", "--device", "4090", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    plan = plan_mesh("FLUX.1-dev", ranks=4, device="4090")
    assert content["fits"] is True and content["ranks"] == 4
    assert [mesh["description"] for mesh in content["meshes"]] == [str(row) for row in plan.rows]
    first = [content["meshes"][0][name] for name in ("seconds", "memory", "code")]
    assert first == [list(plan.seconds_of(plan.best)), plan.best.memory, plan.best.code]


def options_of(command):
    """Return the options of a printed ``para_core generate`` command by name."""
    words = shlex.split(command)
    assert words[:2] == ["para_core", "generate"]
    return dict(zip(words[2::2], words[3::2], strict=True))


def printed_command(out):
    return next(iter(re.findall(r"As a command: (.*)", out)), None)


# The options of plans whose commands differ: placements, ways to shard weights, ring methods.
PLANS = [
    {"device": "RTX 4090"},
    {"device": "RTX 4090", "quantize": "int8"},
    {"ranks": 4, "device": "RTX 4090"},
    {"ranks": 4, "weights": "tensor"},
    {"ranks": 4, "mesh": {"pipe": 2}},
    {"ranks": 2, "offload": "blocks"},
]


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_command_of_every_row_is_one_that_generate_accepts(capsys, monkeypatch, settings):
    plan = plan_mesh("FLUX.1-dev", steps=20, **{"ranks": 1, **settings})
    recipes = []
    monkeypatch.setattr("para_core.cli.generation.make_task", lambda model, recipe, *_: recipes.append(recipe) or 1 / 0)
    for row in plan.rows[:6]:
        one = replace(plan, rows=(row,))
        monkeypatch.setattr("para_core.adapters.planner.plan_mesh.plan_mesh", lambda *_, one=one, **__: one)
        assert run(["plan", "--steps", "20"]) == 0
        command = printed_command(capsys.readouterr().out)
        if command is None:
            assert not row.runs
            continue
        options = options_of(command)
        fixed = {"--ranks": str(plan.ranks), "--model": "black-forest-labs/FLUX.1-dev", "--prompt": "a red circle"}
        sizes = {"--size": "1024x1024", "--steps": "20"}
        assert {name: options[name] for name in fixed | sizes} == fixed | sizes
        whole = row.placement.resident is None and not row.shape.fsdp and not row.placement.takes_turns
        assert options["--compile"] == ("whole" if whole else "blocks")
        # The same options with a model that is here make a recipe with what the row says.
        words = [word for name, value in options.items() if name != "--model" for word in (name, value)]
        assert run(["generate", *words]) == 1 and "ZeroDivisionError" in capsys.readouterr().err
        recipe = recipes.pop()
        sizes = {name.removeprefix("max_").removesuffix("_dim_size"): n for name, n in row.mesh_options.items()}
        assert dict(recipe.mesh) == ({} if plan.ranks == 1 else sizes)
        expected = {"rotate_method": None, "weights": "replicate", "resident_blocks": None, **row.options}
        expected.pop("text_encoders", None)
        assert {name: getattr(recipe, name) for name in expected} == expected
        usual = "offload" if recipe.offload == "blocks" else default_text_encoders(row.shape)
        assert (recipe.text_encoders or usual) == row.placement.encoders
        assert (recipe.offload == "model") == row.placement.takes_turns
        assert recipe.quantize == row.placement.quantize


@pytest.mark.slow
def test_printed_command_runs_and_quotes_a_folder_for_the_shell(capsys, tmp_path):
    folder = shutil.copytree(find_tiny_flux(), tmp_path / "my model; $HOME")
    assert run(["plan", "--model", str(folder), "--size", "64x48", "--steps", "2", "--dtype", "float16"]) == 0
    printed = capsys.readouterr()
    options = options_of(printed_command(printed.out))
    expected = {"--model": str(folder), "--size": "64x48", "--steps": "2", "--dtype": "float16"}
    assert options | expected == options
    assert str(folder) in printed.err and "Counting" in printed.err
    assert run(["plan", "--model", str(folder), "--size", "64x48", "--steps", "2", "--compile", "no"]) == 0
    command = shlex.split(printed_command(capsys.readouterr().out))
    assert run([*command[1:], "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["00001.png"]


def test_weights_of_a_unet_are_compared_with_the_card(capsys, tmp_path):
    unet = UNET_PIPELINES["sd"].build().unet
    unet.save_config(tmp_path / "unet")
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    absent = ("vae", "text_encoder", "tokenizer", "scheduler", "safety_checker", "feature_extractor", "image_encoder")
    (tmp_path / "model_index.json").write_text(json.dumps({**index, **{name: [None, None] for name in absent}}))
    size = 2 * sum(x.numel() for x in unet.parameters()) / 1e9
    assert run(["plan", "--model", str(tmp_path), "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert f"fits 2 × H100: {size:.2g} of the 74 GB" in out and "not predicted" in out


def test_weights_of_an_unknown_model_are_compared_with_the_card(capsys, monkeypatch):
    # The inputs of the FLUX transformer are unknown to the planner, so that its operations cannot be counted.
    monkeypatch.delitem(HIDDEN_SHAPES, "FluxTransformer2DModel")
    flux = str(find_tiny_flux())
    parts = FluxPipeline.from_pretrained(flux, dtype=torch.bfloat16).components
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    sizes = {name: sum(2 * x.numel() for x in module.parameters()) for name, module in modules.items()}
    linears = [x.weight for x in modules["transformer"].modules() if isinstance(x, torch.nn.Linear)]
    encoders = sum(size for name, size in sizes.items() if name.startswith("text_encoder"))
    cases = {
        "": sum(sizes.values()),
        "--quantize int8": sum(sizes.values()) - sum(x.numel() - 4 * x.shape[0] for x in linears),
        "--offload model": max(sizes["transformer"], encoders),
    }
    for options, held in cases.items():
        assert run(["plan", "--model", flux, "--json", *options.split()]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["meshes"][0]["memory"] == pytest.approx(held)
        assert content["meshes"][0]["seconds"] is None and "unknown" in content["uncounted"]
    monkeypatch.setattr("para_core.adapters.planner.count.pipe_workload", mock.Mock(side_effect=ValueError("odd")))
    for sizes, code in (([], 0), (["--size", "64x48"], 1)):  # Without a size the error is about none of the user.
        assert run(["plan", "--model", flux, *sizes]) == code


def test_an_options_file_of_the_siblings_is_taken(capsys, tmp_path):
    shared = tmp_path / "shared.yaml"
    shared.write_text(f"model: {find_tiny_flux()}\npipeline: FluxInpaintPipeline\ntrust-remote-code: yes\n")
    assert run(["plan", "--config", str(shared), "--ranks", "2"]) == 0
    before, after = printed_command(capsys.readouterr().out).split(" --trust-remote-code ")
    options = options_of(f"{before} {after}")
    assert (options["--pipeline"], options["--image"]) == ("FluxInpaintPipeline", "input.png")
    assert options["--set"].startswith("mask_image=")


CARD = "my card,24,140,pcie"
# Each row has options of the command, the same arguments of plan_mesh, and options of the printed command.
SAME = [
    (["--ranks", "2", "--size", "1024x768"], {"ranks": 2, "width": 1024, "height": 768}, {"--size": "1024x768"}),
    (["--device", "4090", "--quantize", "int8"], {"device": "4090", "quantize": "int8"}, {"--quantize": "int8"}),
    (
        ["--ranks", "4", "--mesh", "ring=2", "--weights", "replicate", "--memory", "40"],
        {"ranks": 4, "mesh": {"ring": 2}, "weights": "replicate", "memory": 40e9},
        {"--memory": "40"},
    ),
    (["--offload", "model", "--device", CARD], {"offload": "model", "device": CARD}, {}),
]


@pytest.mark.parametrize(("words", "arguments", "printed"), SAME, ids=lambda value: " ".join(map(str, value)))
def test_options_are_those_of_the_library(capsys, words, arguments, printed):
    assert run(["plan", "--model", "FLUX.1-dev", *words]) == 0
    out = capsys.readouterr().out
    assert str(plan_mesh("FLUX.1-dev", **{"ranks": 1, **arguments})) in out
    options = options_of(printed_command(out))
    assert {name: options.get(name) for name in printed} == printed


def test_a_single_file_is_planned_with_its_configs(capsys, tmp_path):
    flux, file = find_tiny_flux(), tmp_path / "flux.safetensors"
    shutil.copy(next((flux / "transformer").glob("*.safetensors")), file)
    assert run(["plan", "--model", str(file), "--config", str(flux), "--size", "64x64"]) == 0
    options = options_of(printed_command(capsys.readouterr().out))
    assert (options["--model"], options["--config"]) == (str(file), str(flux))
    assert run(["plan", "--model", str(file)]) == 2
    assert "--config" in capsys.readouterr().err


def test_a_plan_over_hosts_is_run_by_torchrun(capsys):
    for ranks, per_host in (("16", "8"), ("12", "6")):
        assert run(["plan", "--ranks", ranks]) == 0
        assert f"torchrun --nnodes=2 --nproc_per_node={per_host} --rdzv-backend=c10d" in capsys.readouterr().out


def test_an_unreachable_hub_is_stated(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", mock.Mock(side_effect=OSError("no network")))
    assert run(["plan", "--model", "black-forest-labs/FLUX.1-dve"]) == 1
    assert re.search(r"did you mean FLUX\.1-dev.*cannot be reached", capsys.readouterr().err)


def test_doctor_and_lists_print_what_they_know(capsys, tmp_path):
    assert run(["plan", "--list"]) == 0
    assert "FLUX.1-dev" in capsys.readouterr().out.splitlines()
    figures = tmp_path / "doctor.json"
    assert run(["doctor", "--cpu", "--out", str(figures)]) == 0
    assert "torch" in capsys.readouterr().out
    assert json.loads(figures.read_text())
