"""The node that loads a model on ranks, in a stand-in for ComfyUI with the same interfaces (`standin`).

`test_server.py` runs the same pack in ComfyUI itself.
"""

import gc
import importlib
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.attention.one_device import relative_error as error
from tests.comfyui.pack import load_nodes

HERE = Path(__file__).parent
LORA = {"diffusion_model.blocks.1.self_attn.q.weight": 0.3 * torch.ones(16, 16)}


@pytest.fixture(scope="module")
def comfy():
    """Put the stand-in on ``sys.path`` as ComfyUI is, and remove it after the tests."""
    before = set(sys.modules)
    sys.path.insert(0, str(HERE / "standin"))
    import comfy.model_management
    import comfy.sample
    import comfy.sd

    yield comfy
    comfy.model_management.unload_all_models()
    sys.path.remove(str(HERE / "standin"))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("comfy", "folder_paths") or "custom_nodes" in name:
            del sys.modules[name]


@pytest.fixture(scope="module")
def nodes(comfy, tmp_path_factory):
    return load_nodes(tmp_path_factory.mktemp("comfyui"))


def write_model(comfy, folder, module, cls):
    import comfy.ops

    torch.manual_seed(0)
    model = getattr(importlib.import_module(module), cls)(operations=comfy.ops.disable_weight_init, dtype=torch.float32)
    path = folder / f"{cls}.safetensors"
    save_file(model.state_dict(), path, {"class": f"{module}.{cls}"})
    return str(path)


@pytest.fixture(scope="module")
def wan(comfy, tmp_path_factory):
    return write_model(comfy, tmp_path_factory.mktemp("files"), "comfy.ldm.wan.model", "WanModel")


def load(nodes, path, **settings):
    inputs = {"weight_dtype": "default", "ranks": 2, "mesh": "auto", "cache": 0.0, "weights": "replicated"}
    return nodes["ParaCoreLoadOnRanks"]().load(path, **{**inputs, **settings})[0]


@pytest.fixture(scope="module")
def remote(nodes, wan):
    model = load(nodes, wan)
    yield model
    model.close_ranks()


def sampled(comfy, patcher, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    noise, context = (torch.randn(shape, generator=generator) for shape in ((1, 4, 3, 6, 10), (1, 5, 6)))
    return comfy.sample.sample(patcher, noise, context, **options)


def ranks_of_this_process():
    children = psutil.Process().children()
    return [child.pid for child in children if "para_core.launcher.rank" in " ".join(child.cmdline())]


def refused(call):
    """Return the message of the ValueError that ``call`` raises."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_loras_are_sent_once_for_each_change(comfy, remote):
    sampled(comfy, remote)  # This starts the ranks.
    handle = type(remote.ranks._handle)
    with mock.patch.object(handle, "_run", autospec=True, side_effect=handle._run) as run:
        patcher = remote.clone()
        patcher.add_patches(LORA)
        for seed in range(2):
            sampled(comfy, patcher, seed)
    calls = [call.args[2] for call in run.call_args_list]
    assert (calls.count("patch"), calls.count("forward")) == (1, 8)


def test_changes_of_the_patcher_give_the_samples_of_one_process(comfy, remote, wan):
    for change in (
        lambda model: model.add_wrapper_with_key("diffusion_model", "a", lambda call, *x, **kw: 1.5 * call(*x, **kw)),
        lambda model: model.model_options["transformer_options"].update(rope_options={"scale_x": 3.0}),
        lambda model: model.add_patches(LORA, 0.8),
    ):
        local, patcher = comfy.sd.load_diffusion_model(wan), remote.clone()
        without = sampled(comfy, local)
        for model in (local, patcher):
            change(model)
        expected = sampled(comfy, local)
        assert error(expected, without) > 1e-4
        for model, latent in ((remote, without), (patcher, expected), (remote, without)):
            assert error(sampled(comfy, model), latent) < 1e-5
    assert all(x.is_meta for x in remote.model.diffusion_model.parameters())


def test_methods_and_sizes_of_the_model_are_those_of_the_ranks(comfy, remote, wan):
    from comfyui_para_core.rank_model import RankModel, State

    text = torch.randn(1, 5, 6)
    sampled(comfy, remote)
    expected = comfy.sd.load_diffusion_model(wan).model.diffusion_model.preprocess_text_embeds(text)
    torch.testing.assert_close(remote.model.diffusion_model.preprocess_text_embeds(text), expected)
    rank, patcher = object.__new__(RankModel), type("Patcher", (), {"load_device": "meta", "offload_device": "cpu"})
    vars(rank).update(patcher=patcher, model=torch.nn.Identity(), shards_weights=True, state=State.LOADED)
    assert torch.equal(rank.call_method("forward", (text,), {}), text)  # Whole weights wait in host memory.
    size = sum(x.numel() * x.element_size() for x in remote.model.diffusion_model.parameters())
    elsewhere = remote.clone()
    elsewhere.load_device = torch.device("cuda", 1)  # Rank 0 is on GPU 0.
    assert (elsewhere.model_size(), elsewhere.loaded_size()) == (1, 0)
    assert remote.model_size() == remote.loaded_size() == size
    assert remote.model.memory_required([1]) == 500.0  # of 1000.0 on two ranks


def replaced(args, extra):
    return extra["original_block"](args)


def option(**options):
    return lambda patcher: patcher.model_options["transformer_options"].update(options)


# Changes that do not reach the ranks, and the words by which they are refused.
CHANGES = [
    (option(patches_replace={"dit": {("double_block", 0): replaced}}), "patches_replace .*dit.*replaced"),
    (option(patches={"attn1_patch": [replaced]}), "patches .*attn1_patch.*replaced"),
    (option(optimized_attention_override=replaced), "optimized_attention_override.*replaced"),
    (option(of_another_pack=3), "of_another_pack"),
    (option(wrappers={"inside_of_the_model": {None: [replaced]}}), "wrappers.*inside_of_the_model"),
    (option(callbacks={"inside_of_the_model": {None: [replaced]}}), "callbacks.*inside_of_the_model"),
    (lambda model: model.object_patches.update({"diffusion_model.head": 0, "manual_cast_dtype": 0}), "head, manual_"),
    (lambda patcher: patcher.weight_wrapper_patches.update(weight=[replaced]), "weight"),
    (lambda patcher: patcher.injections.update(a_pack=[replaced]), "a_pack"),
    (lambda patcher: patcher.hook_patches.update(a_hook={}), "a_hook"),
    (lambda patcher: patcher.add_hook_patches(None, {}), "hook LoRA"),
    (lambda patcher: patcher.add_wrapper_with_key("apply_model", "torch.compile", replaced), "torch.compile"),
    (lambda patcher: patcher.get_key_patches(), "merges"),
    (lambda patcher: patcher.state_dict_for_saving(), "saves"),
    (lambda patcher: patcher.deepclone_multigpu(), "MultiGPU"),
    (lambda patcher: patcher.additional_models.update(multigpu=[patcher]), "MultiGPU"),
]


def test_what_does_not_reach_the_ranks_is_refused_by_name(comfy, remote):
    for change, words in CHANGES:
        patcher = remote.clone()
        assert re.search(words, refused(lambda change=change, model=patcher: (change(model), sampled(comfy, model))))
    for value, words in ((torch.zeros(1), "condition vace_context"), (object(), r"argument vace_context .*\.object")):
        assert re.search(words, refused(lambda value=value: sampled(comfy, remote, vace_context=value)))


def test_empty_options_and_changes_outside_of_the_model_are_not_refused(comfy, remote, wan):
    expected = sampled(comfy, comfy.sd.load_diffusion_model(wan))
    for empty in ({"patches": {}}, {"patches_replace": {"dit": {}}}, {"of_another_pack": None}):
        patcher = remote.clone()
        patcher.model_options["transformer_options"].update(empty)
        patcher.add_object_patch("model_sampling", object())
        out = sampled(comfy, patcher, vace_context=None, crossattn_controlnet=torch.zeros(1))
        assert error(out, expected) < 1e-5


def test_ranks_that_were_unloaded_killed_or_failed_start_again(comfy, nodes, remote, wan):
    patcher, local, misfit = remote.clone(), comfy.sd.load_diffusion_model(wan), remote.clone()
    for model in (patcher, local):
        model.add_patches(LORA, 0.5)
    expected = sampled(comfy, local)
    assert error(sampled(comfy, patcher), expected) < 1e-5
    comfy.model_management.unload_all_models()
    assert (ranks_of_this_process(), remote.loaded_size(), remote.model_size() > 1) == ([], 0, True)
    assert error(sampled(comfy, patcher), expected) < 1e-5
    psutil.Process(ranks_of_this_process()[1]).kill()
    with pytest.raises(RuntimeError, match="rank"):
        sampled(comfy, patcher)
    assert patcher.begins_generation  # Its first call failed.
    assert error(sampled(comfy, patcher), expected) < 1e-5
    misfit.add_patches({name: x[:3, :3] for name, x in LORA.items()})
    with pytest.raises(RuntimeError):
        sampled(comfy, misfit)
    samples, node = {"samples": sampled(comfy, patcher)}, nodes["ParaCoreCloseRanks"]()
    assert error(samples["samples"], expected) < 1e-5
    assert node.close(remote, samples) == (samples,)
    assert ranks_of_this_process() == []
    assert "has no ranks" in refused(lambda: node.close(local, samples))


def test_classes_and_attention_that_cannot_run_so_are_errors_of_the_loader(comfy, nodes, wan, monkeypatch):
    from comfy.ldm.modules import attention

    from comfyui_para_core.checks import require_runnable
    from comfyui_para_core.settings import Settings

    for module, name, settings, words in (
        ("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel", {"ranks": 2}, "UNet"),
        ("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel", {"cache": 0.1}, "UNet"),
        ("comfy.ldm.wan.model", "VaceWanModel", {"cache": 0.1}, "cache is 0.1"),
    ):
        model = type(name, (), {"__module__": module, "__qualname__": name})
        require_runnable(model, Settings(ranks=1))
        changed = Settings(**{"ranks": 1, **settings})
        assert words in refused(lambda model=model, changed=changed: require_runnable(model, changed))

    monkeypatch.setattr(attention, "optimized_attention", replaced)
    assert re.search("replaced.*--use-pytorch-cross-attention", refused(lambda: load(nodes, wan)))
    load(nodes, wan, ranks=1)


def test_parts_of_weights_and_the_cache_and_ends_with_the_model(comfy, nodes, wan):
    local = comfy.sd.load_diffusion_model(wan)
    expected = sampled(comfy, local, steps=8)
    model = load(nodes, wan, weights="fsdp", cache=0.3, mesh="ring 2")
    patcher = model.clone()
    patcher.add_patches(LORA)
    model.ranks.start(patcher.patches, patcher.patches_uuid)  # Replaced before a call has sharded the weights.
    out = sampled(comfy, model, steps=8)
    assert 1e-6 < error(out, expected) < 0.3
    assert torch.equal(sampled(comfy, model, steps=8), out)
    text = torch.randn(1, 5, 6)
    model.ranks.start(model.patches, model.patches_uuid)
    embedded = model.ranks.call_method("preprocess_text_embeds", (text,), {})
    torch.testing.assert_close(embedded, local.model.diffusion_model.preprocess_text_embeds(text))
    assert error(sampled(comfy, patcher, steps=8), out) > 1e-3
    assert torch.equal(sampled(comfy, model, steps=8), out)
    comfy.model_management.current_loaded_models.clear()
    del model, patcher
    gc.collect()
    assert ranks_of_this_process() == []


def test_without_para_core_the_loader_says_so_and_the_other_nodes_are_there(comfy, wan, tmp_path):
    program = f"""
import sys
sys.modules["para_core"] = sys.modules["cloudpickle"] = None  # To import one is an error.
sys.path[:0] = [{str(HERE / "standin")!r}]
from tests.comfyui.pack import load_nodes
nodes = load_nodes({str(tmp_path)!r})
print(*nodes)
nodes["ParaCoreLoadOnRanks"]().load({wan!r}, "default", 2, "auto", 0.0, "replicated")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ParaCoreTextToImage" in ended.stdout
    assert ended.stderr.splitlines()[-1].startswith("RuntimeError: para_core and cloudpickle cannot be imported")


def test_a_model_whose_changes_failed_half_way_is_loaded_again(wan, monkeypatch):
    from comfyui_para_core import rank_model

    rank = rank_model.RankModel(wan, {}, rank_model.Settings(ranks=1, cache=0.3))
    inputs = {"x": torch.zeros(1, 4, 3, 6, 10), "timestep": torch.zeros(1), "context": torch.zeros(1, 5, 6)}
    failed = rank.model
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(rank_model, "apply_cache", lambda *args, **kwargs: 1 / 0)
        rank.forward(inputs, True)
    rank.forward(inputs, True)
    assert rank.model is not failed


@pytest.mark.long
def test_a_class_without_a_recorded_plan_is_proposed_on_a_small_copy(comfy, nodes, tmp_path):
    path = write_model(comfy, tmp_path, "comfy.ldm.other.model", "OtherModel")
    model, local = load(nodes, path), comfy.sd.load_diffusion_model(path)
    assert error(sampled(comfy, model), sampled(comfy, local)) < 1e-5
    # With another condition the plan is proposed again.
    bias = {"clip_fea": torch.linspace(-1, 1, 16)}
    assert error(sampled(comfy, local, **bias), sampled(comfy, local)) > 1e-3
    assert error(sampled(comfy, model, **bias), sampled(comfy, local, **bias)) < 1e-5
    model.close_ranks()


def test_a_proposal_resizes_latents_alone_and_its_errors_reach_all_ranks(comfy, monkeypatch):
    from comfyui_para_core import propose

    model = type("Model", (), {"patch_size": (1, 2, 3), "forward": lambda x, context=None, mask=None, concat=None: x})
    sound, x, mask = torch.zeros(1, 64, 768), torch.zeros(1, 4, 8, 12), torch.arange(96).view(1, 1, 8, 12) > 40
    example = propose.make_example(model, {"x": sound, "context": torch.zeros(1, 130, 768), "mask": sound[:, :1]}, 5, 7)
    assert [tuple(value.shape[1:]) for value in example.values()] == [(64, 105), (130, 768), (1, 105)]
    example = propose.make_example(model, {"x": x, "concat": x, "mask": mask, "of_another_pack": x}, 5, 7)
    assert [tuple(value.shape[1:]) for value in example.values()] == [(4, 10, 21), (4, 10, 21), (1, 10, 21)]
    assert (example["mask"].dtype, torch.equal(example["x"], example["concat"])) == (torch.bool, False)
    assert "first argument, x, is a list" in refused(lambda: propose.make_example(model, {"x": [x], "mask": x}, 5, 7))
    send = {"get_rank": lambda: 0, "broadcast_object_list": lambda outcome, src: propose.pickle.dumps(outcome)}
    monkeypatch.setattr(propose, "dist", type("dist", (), {"is_initialized": lambda: True, **send}))
    monkeypatch.setattr(propose, "_propose", lambda *args: lambda: "a function that cannot be sent")
    assert "no plan is recorded" in refused(lambda: propose.propose_on_small_model(None, torch.nn.Identity(), {}))


def test_settings_that_do_not_fit_are_errors_of_the_loader(nodes, wan):
    meshes = [("mesh", mesh) for mesh in ("ring 3", "ring 2 ring 2", "?")]
    others = [("cache", float("nan")), ("weights", "tensor"), ("weight_dtype", "int4")]
    for name, value in (("ranks", 0), *meshes, *others):
        assert f"{name} is {value!r}" in refused(lambda setting={name: value}: load(nodes, wan, **setting))


def test_options_of_each_weight_dtype_are_those_of_comfyui(nodes, monkeypatch):
    package = nodes["ParaCoreLoadOnRanks"].__module__.rpartition(".")[0]
    patcher = importlib.import_module(f"{package}.remote_patcher")
    monkeypatch.setattr(patcher, "load_remote", lambda path, options, settings: options)
    names, e4m3 = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"), {"dtype": torch.float8_e4m3fn}
    options = [load(nodes, "", weight_dtype=name) for name in names]
    assert options == [{}, e4m3, {**e4m3, "fp8_optimizations": True}, {"dtype": torch.float8_e5m2}]


def test_a_subclass_has_no_plan_of_its_base_class():
    from comfyui_para_core.plans import find_plan

    base = type("WanModel", (), {"__module__": "comfy.ldm.wan.model", "__qualname__": "WanModel"})
    derived = type("Other", (base,), {"__module__": "comfy.ldm.wan.model", "__qualname__": "Other"})
    assert find_plan(base).models.startswith("Wan") and find_plan(derived) is None


def test_arguments_are_brought_into_the_form_of_a_plan_or_refused():
    from comfyui_para_core.plans import cosmos, flux, joint_attention, ltx, wan

    model = mock.Mock(patch_size=(1, 2, 2), patch_temporal=2, ref_conv=torch.nn.Identity())
    call = {"x": torch.zeros(1, 4, 3, 4, 5), "timestep": torch.arange(3.0)[None], "timesteps": torch.ones(1)}
    assert wan.WAN.prepare(model, call)["timestep"].tolist() == [[0.0] * 6 + [1.0] * 6 + [2.0] * 6]
    assert "reference_latent" in wan.WAN.refusals[0](model, {**call, "reference_latent": torch.zeros(1)})
    assert cosmos.COSMOS_PREDICT2.prepare(model, call)["timesteps"].tolist() == [[1.0, 1.0]]
    call = {"ref_latents": [0], "ref_latents_method": "index_timestep_zero", "control": {}}
    assert all(refusal(model, call) for refusal in flux.FLUX.refusals) and len(flux.FLUX.refusals) == 2
    (refusal,) = ltx.LTX2.refusals
    assert [bool(refusal(model, {"timestep": torch.ones(1, number)})) for number in (1, 3)] == [False, True]
    call = {"context": torch.ones(1, 5, 2), "attention_mask": torch.arange(5)[None] < 3, "num_tokens": 3}
    assert joint_attention.MOCHI.prepare(model, call)["context"].shape[1] == 3


def test_names_of_blocks_streams_and_conditions_agree_in_each_plan():
    from comfyui_para_core.plans import PLANS

    with_blocks = {cls: plan for cls, plan in PLANS.items() if not plan.refused and plan.adapter.blocks is not None}
    assert len(with_blocks) > 25
    for cls, recorded in with_blocks.items():
        plan, blocks = recorded.adapter.plan, recorded.adapter.blocks
        names = [*plan.inner, *plan.outputs, *plan.attention, *plan.halos]
        indexed = {re.split(r"\.(?:\*|0|-1)", name)[0] for name in names if re.search(r"\.(\*|0|-1)", name)}
        assert indexed <= {name for group in blocks.groups for name in group.lists}, cls
        first = blocks.groups[0]
        assert set(plan.inner[f"{first.lists[0]}.0"]) <= set(first.streams), cls
        assert set(blocks.conditions) <= set(recorded.arguments), cls
