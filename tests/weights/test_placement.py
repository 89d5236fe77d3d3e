"""Text encoders, VAEs and blocks that wait in host memory or run on one rank give the unmodified pipeline's results."""

from math import prod
from unittest import mock

import pytest
import torch
from diffusers.hooks import HookRegistry, apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from torch import nn

from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    remove_cache_from_pipe,
    shard_weights,
    unparallelize_pipe,
)
from para_core.adapters.inspect.components import stack_of
from para_core.adapters.weights.host_block import HostBlock
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.weights.fsdp import is_sharded
from tests.adapters.parallel.test_undo import same_pipe
from tests.tiny import relative_error
from tests.together.snapshot import differences, snapshot
from tests.weights.copying_group import CopyingGroup
from tests.weights.pipes import add_lora, count_encodings, encoders, generate, make, mesh_of


def draw(pipe, name, **options):
    """Return an image, so that the VAE runs too."""
    return generate(pipe, name, output_type="pt", generator=torch.Generator().manual_seed(7), **options)


def count_decodings(pipe):
    """Count the calls of a layer of the VAE on this rank."""
    calls = []
    layer = next(x for x in pipe.vae.decoder.modules() if isinstance(x, (nn.Conv2d, nn.Conv3d)))
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


def place(name, dims, options):
    """Return the images of the placed and of the undone pipeline, whether text encoders and VAE ran here, and which
    blocks are offloaded.
    """
    pipe = make(name)
    encodings, decodings = count_encodings(pipe), count_decodings(pipe)
    draw(pipe, name)  # Some parts add attributes to themselves in their first call.
    before = snapshot(pipe)
    encodings.clear()
    decodings.clear()
    parallelize_pipe(pipe, mesh=mesh_of(dims) if dims else None, **options)
    images = [draw(pipe, name) for _ in range(2)]
    ran = bool(encodings), bool(decodings)
    blocks = [is_filled(entry.block, Slot.OFFLOADED_BLOCK) for entry in stack_of(pipe.transformer)]
    # Nothing undoes sharded weights.
    if "pipe" in dims or "fsdp" in options.values() or options.get("weights"):
        return images, ran, blocks
    unparallelize_pipe(pipe)
    images.append(draw(pipe, name))
    changed = differences(snapshot(pipe), before)
    assert not changed, changed
    return images, ran, blocks


FIRST = {"text_encoders": "first", "vae_placement": "first"}
OFFLOAD = {"text_encoders": "offload", "vae_placement": "offload"}
BLOCKS = {"offload": "blocks"}
CASES = [
    ("flux", {"ulysses": 2}, {**FIRST, **BLOCKS, "resident_blocks": 0}),
    ("flux", {"ring": 2}, {**OFFLOAD, "vae": True}),
    ("flux", {"pipe": 2}, {"text_encoders": "fsdp", "vae_placement": "first"}),
    ("flux", {"ulysses": 2}, {"weights": "fsdp", "text_encoders": "first", "vae_placement": "offload"}),
    ("flux", {"ring": 2, "tensor": 2}, {"weights": "tensor", "text_encoders": "fsdp", "vae": True}),
    ("wan 2.2", {"batch": 2}, {**FIRST, **BLOCKS, "resident_blocks": 1}),
    ("wan 2.2", {"batch": 2}, {"text_encoders": "replicate", "vae_placement": "offload"}),
]
LONG = [
    ("flux", {"pipe": 2}, FIRST),
    ("flux", {"ring": 2, "ulysses": 2}, {**OFFLOAD, **BLOCKS, "resident_blocks": 2}),
    ("wan 2.2", {"ring": 2}, {**OFFLOAD, "vae": True}),
    ("wan 2.2", {"batch": 2, "ring": 2}, {"weights": "fsdp", **OFFLOAD}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "dims", "options"), [*CASES, *[pytest.param(*case, marks=pytest.mark.long) for case in LONG]]
)
def test_placed_parts_are_exact_and_undone(rank_pool, name, dims, options):
    expected = draw(make(name), name)
    for rank, (images, ran, blocks) in enumerate(rank_pool.run(place, prod(dims.values()), name, dims, options)):
        assert max(relative_error(image, expected) for image in images) < 1e-5
        assert ran[0] == (options["text_encoders"] != "first" or rank == 0)
        assert ran[1] == (options.get("vae_placement") != "first" or rank == 0)
        resident = options.get("resident_blocks", len(blocks))
        assert blocks == [index >= resident for index in range(len(blocks))]


@pytest.mark.parametrize("name", ["flux", "wan 2.2", pytest.param("hunyuan", marks=pytest.mark.long)])
def test_placement_on_one_rank_gives_the_same_bits(name):
    images, _, blocks = place(name, {}, {**OFFLOAD, **BLOCKS, "resident_blocks": 1})
    expected = draw(make(name), name)
    assert all(torch.equal(image, expected) for image in images)
    assert blocks == [False, *[True] * (len(blocks) - 1)]


def special_cases():
    """Return (image or latents, reference) by case, and the messages of errors, on two ranks."""
    outs, errors = {}, []
    pipe = parallelize_pipe(make("flux"), mesh=mesh_of({"tensor": 2}), weights="tensor")
    assert all(is_sharded(module) for module in encoders(pipe).values())
    outs["tensor weights shard text encoders by default"] = draw(pipe, "flux"), draw(make("flux"), "flux")

    # One of the ranks computes no branch of guidance, and the VAE is the first to read the latents.
    options = {"guidance_scale": 1.0, "guidance_scale_2": 1.0}
    pipe = parallelize_pipe(make("wan 2.2"), mesh=mesh_of({"batch": 2}), vae_placement="first")
    alone = draw(make("wan 2.2"), "wan 2.2", **options)
    outs["a rank without a branch waits"] = draw(pipe, "wan 2.2", **options), alone

    pipe = parallelize_pipe(make("flux"), mesh=mesh_of({"ring": 2}), **FIRST)
    image = torch.rand(1, 3, 24, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latents = [x.vae.encode(image).latent_dist for x in (pipe, make("flux"))]
    outs["mean of an encoded image"] = tuple(x.mean for x in latents)
    outs["sample of an encoded image"] = tuple(x.sample(torch.Generator().manual_seed(2)) for x in latents)
    # The token is outside the vocabulary, and the latents have another number of channels.
    for part, call in (
        ("text_encoder_2", lambda: pipe.text_encoder_2(torch.tensor([[10**6]]))),
        ("pipe.vae", lambda: pipe.vae.decode(torch.ones(1, 3, 5, 5))),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        errors.append((part, str(caught.value)))
    outs["after errors of the first rank"] = draw(pipe, "flux"), draw(make("flux"), "flux")

    # Two pipelines share a VAE.
    for earlier, later in (({"vae_placement": "first"}, {"vae": True}), ({"vae": True}, {"vae_placement": "first"})):
        pipes = [make("flux") for _ in range(2)]
        pipes[1].vae = pipes[0].vae
        parallelize_pipe(pipes[0], mesh=mesh_of({"ulysses": 2}), **earlier)
        with pytest.raises(ValueError, match="vae_placement='first'"):
            parallelize_pipe(pipes[1], mesh=mesh_of({"ulysses": 2}), **later)
        for index, pipe in enumerate(pipes):
            outs[f"a shared VAE with {earlier}, {index}"] = draw(pipe, "flux"), draw(make("flux"), "flux")
    return outs, errors


@pytest.mark.filterwarnings("ignore:.*branches of guidance")
def test_special_cases_of_placement_on_ranks(rank_pool):
    for outs, errors in rank_pool.run(special_cases, 2):
        assert {name: relative_error(*pair) for name, pair in outs.items() if relative_error(*pair) >= 1e-5} == {}
        assert all(part in error for part, error in errors)
        assert "IndexError" in errors[0][1]


# -- Refusals.


def offload_a_part(name):
    """Return a change that applies diffusers' group offload to a component."""
    return lambda pipe: apply_group_offloading(getattr(pipe, name), torch.device("cpu"), offload_type="leaf_level")


def drop(*names):
    return lambda pipe: [setattr(pipe, name, None) for name in names]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"text_encoders": "disk"}, "disk"),
        (offload_a_part("text_encoder"), {"text_encoders": "offload"}, "text_encoder "),
        (drop("text_encoder", "text_encoder_2"), {"text_encoders": "first"}, "no text encoder"),
        (None, {"vae_placement": "fsdp"}, "first"),
        (None, {"vae_placement": "first", "vae": True}, "first"),
        (offload_a_part("vae"), {"vae_placement": "offload"}, r"pipe\.vae"),
        (drop("vae"), {"vae_placement": "first"}, "autoencoder"),
        (None, {"offload": "disk"}, "expected"),
        (None, {"offload": "blocks", "resident_blocks": 99}, "expected"),
        (None, {"offload": "blocks", "resident_blocks": -1}, "expected"),
        (None, {"resident_blocks": -1}, "expected"),
        *[(None, {"resident_blocks": n}, rf"resident_blocks is {n} .*offload='blocks'") for n in (4, 1, 0)],
        (offload_a_part("transformer"), {"offload": "blocks"}, "transformer is offloaded"),
    ],
)
def test_placement_that_does_not_fit_is_refused_and_changes_nothing(change, options, message):
    pipe = make("flux")
    if change is not None:
        change(pipe)
    with same_pipe(pipe), pytest.raises(ValueError, match=message):
        parallelize_pipe(pipe, **options)


def refused_on_ranks():
    """Return the messages of combinations that are refused on both ranks, and an image after them."""
    messages = []
    ulysses, pipe = mesh_of({"ulysses": 2}), make("flux")

    def refused(error, call, *args, **options):
        with same_pipe(pipe), pytest.raises(error) as caught:
            call(pipe, *args, **options)
        messages.append(str(caught.value))

    refused(ValueError, parallelize_pipe, mesh=mesh_of({"pipe": 2}), **BLOCKS)
    refused(ValueError, parallelize_pipe, mesh=ulysses, weights="fsdp", **BLOCKS)
    for options, rest in (
        ({"text_encoders": "first"}, ["transformer"]),
        ({"offload": "blocks"}, ["text_encoder", "text_encoder_2"]),
    ):
        pipe = parallelize_pipe(make("flux"), mesh=ulysses, **options)
        refused(ValueError, shard_weights, ulysses)
        shard_weights(pipe, ulysses, components=rest)
    pipe = make("flux")
    if torch.distributed.get_rank() == 1:
        offload_a_part("text_encoder_2")(pipe)
    refused(ValueError, shard_weights, ulysses)
    pipe = shard_weights(make("flux"), ulysses)
    refused(RuntimeError, parallelize_pipe, mesh=ulysses, **BLOCKS)
    return messages, draw(pipe, "flux")


def test_placement_and_sharding_exclude_each_other_on_every_rank(rank_pool):
    expected = draw(make("flux"), "flux")
    named = ["offload='blocks' with", "offload='blocks' with", "pipe.text_encoder ", "pipe.transformer "]
    named += ["pipe.text_encoder_2 ", "sharded already"]
    for messages, image in rank_pool.run(refused_on_ranks, 2):
        assert [word for word, message in zip(named, messages, strict=True) if word not in message] == []
        assert all("components=" in message for message in messages[2:5])
        assert relative_error(image, expected) < 1e-5


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offload_can_be_removed_as_advised(offload_type):
    pipe = make("flux")
    expected = draw(pipe, "flux")
    pipe.text_encoder_2.requires_grad_(False)
    apply_group_offloading(pipe.text_encoder_2, torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1)
    with pytest.raises(ValueError, match=r"pipe\.text_encoder_2 .*remove_hook\(.*group_offloading"):
        parallelize_pipe(pipe, text_encoders="offload")
    for name in ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading"):
        HookRegistry.check_if_exists_or_initialize(pipe.text_encoder_2).remove_hook(name)
    parallelize_pipe(pipe, text_encoders="offload")
    assert torch.equal(draw(pipe, "flux"), expected)


def test_a_second_pipeline_of_the_same_transformer_is_refused():
    pipe, other = make("flux"), make("flux")
    other.transformer = pipe.transformer
    parallelize_pipe(pipe, offload="blocks")
    with same_pipe(pipe), pytest.raises(ValueError, match=r"pipe\.transformer .*unparallelize_pipe"):
        parallelize_pipe(other, offload="blocks")
    expected = draw(pipe, "flux")
    unparallelize_pipe(pipe)
    parallelize_pipe(other, offload="blocks")
    assert torch.equal(draw(other, "flux"), expected)


# -- Copies of weights.


def counted_copies(pipe, num_steps):
    """Return the number of copies of blocks in a generation, without the memory traffic itself."""
    copies = []

    def note(group):
        copies.append(group)

    with mock.patch.object(ModuleGroup, "onload_", note):
        generate(pipe, "flux", num_inference_steps=num_steps)
    return len(copies)


def test_a_skipped_step_copies_nothing():
    pipe = parallelize_pipe(make("flux"), offload="blocks")
    num_blocks = len(stack_of(pipe.transformer)) - 1
    assert counted_copies(pipe, 2) == 2 * num_blocks
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    num_copies = counted_copies(pipe, 6)
    computed = cache_report(pipe).computed
    assert 0 < computed < 6
    assert num_copies == computed * num_blocks


def test_each_block_is_copied_while_the_one_before_runs():
    pipe, events = make("flux"), []
    parallelize_pipe(pipe, offload="blocks", resident_blocks=0)
    blocks = [entry.block for entry in stack_of(pipe.transformer)]
    for index, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, index=index: events.append(f"run {index}"))
    onload = ModuleGroup.onload_

    def noted(group):
        events.append(f"copy {blocks.index(group.modules[0])}")
        onload(group)

    with mock.patch.object(ModuleGroup, "onload_", noted):
        generate(pipe, "flux", num_inference_steps=1)
    for index in range(len(blocks) - 1):
        assert events.index(f"copy {index + 1}") < events.index(f"run {index}")


@pytest.mark.long
def test_compiled_blocks_are_whole_graphs_and_a_whole_transformer_is_refused():
    expected = generate(make("flux"), "flux")
    for is_first in (True, False):
        pipe = make("flux")
        if is_first:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        parallelize_pipe(pipe, offload="blocks")
        if not is_first:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        assert relative_error(generate(pipe, "flux"), expected) < 1e-5
        unparallelize_pipe(pipe)
        assert relative_error(generate(pipe, "flux"), expected) < 1e-5
    pipe = parallelize_pipe(make("flux"), offload="blocks")
    pipe.transformer.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile_repeated_blocks"):
        generate(pipe, "flux")


def scale(pipe):
    for entry in stack_of(pipe.transformer):
        for x in (*entry.block.parameters(), *entry.block.buffers()):
            x.data.mul_(1.25)


def load(pipe):
    pipe.transformer.load_state_dict({key: 0.75 * x for key, x in pipe.transformer.state_dict().items()})


CHANGES = {
    "scaled": [scale],
    "loaded": [load],
    "moved": [lambda pipe: pipe.to("cpu")],
    "LoRA": [add_lora, lambda pipe: pipe.transformer.set_adapters("default", 0.5)],
    "fused": [lambda pipe: (add_lora(pipe), pipe.transformer.fuse_lora())],
}


@pytest.mark.parametrize(
    ("change", "state"), [*[(change, "computed") for change in CHANGES], ("scaled", "skipped"), ("scaled", "failed")]
)
def test_weights_changed_after_a_call_are_used_in_all_steps(change, state):
    pipe, plain = make("flux"), make("flux")
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, offload="blocks", resident_blocks=0 if state == "skipped" else 1)
        if state == "skipped":
            # The last step is skipped after the first block, when the second one was already copied.
            apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=1, warmup_steps=1)
        if state == "failed":
            block = stack_of(pipe.transformer)[2].block
            handle = block.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generate(pipe, "flux")
            handle.remove()
        else:
            generate(pipe, "flux", num_inference_steps=4)
        remove_cache_from_pipe(pipe)
        for step in CHANGES[change]:
            step(pipe)
            step(plain)
            assert torch.equal(generate(pipe, "flux"), generate(plain, "flux"))
        unparallelize_pipe(pipe)
    assert torch.equal(generate(pipe, "flux"), generate(plain, "flux"))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.scale * x


def test_buffer_changed_in_place_is_used():
    module, device = WithBuffer(), torch.device("cpu")
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        block = HostBlock(module, device, None)
    for factor in (1, 2):
        block.load()
        assert module(1).tolist() == [factor] * 3
        block.free()
        module.scale.mul_(2)


def tensors_of(*modules):
    return [x for module in modules for x in (*module.parameters(), *module.buffers())]


@torch.no_grad()
def test_video_needs_one_copy_of_the_weights():
    pipe, expected = make("wan"), make("wan").vae
    vae = pipe.vae
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, vae_placement="offload")
        held = [x.data_ptr() for x in tensors_of(vae)]
        for frames in (1, 3, 5):
            CopyingGroup.copies = 0
            latents = torch.randn(1, vae.config.z_dim, frames, 4, 3)
            assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)
            assert CopyingGroup.copies == len(tensors_of(vae.decoder, vae.post_quant_conv, vae.quant_conv))
            CopyingGroup.copies = 0
            video = torch.randn(1, 3, 4 * frames - 3, 16, 24)
            assert torch.equal(vae.encode(video).latent_dist.mean, expected.encode(video).latent_dist.mean)
            assert CopyingGroup.copies == len(tensors_of(vae.encoder, vae.post_quant_conv, vae.quant_conv))
            # The weights in host memory are the same tensors, so nothing was copied back.
            assert [x.data_ptr() for x in tensors_of(vae)] == held
        vae.decoder.conv_out.weight.data.mul_(1.5)
        expected.decoder.conv_out.weight.data.mul_(1.5)
        assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)
        # A failure frees the copies too.
        with pytest.raises(RuntimeError):
            vae.decode(torch.ones(1, 1, 1, 1, 1))
        assert [x.data_ptr() for x in tensors_of(vae)] == held
        unparallelize_pipe(pipe)
    assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)


@torch.no_grad()
def test_a_lora_that_is_loaded_later_leaves_the_vae_offloaded():
    """Check a LoRA that is loaded later: diffusers then applies its group offload again, to all components that seem to
    have it.
    """
    pipe, alone = make("flux"), make("flux")
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, vae_placement="offload")
        weights = {"A": torch.randn(2, alone.transformer.context_embedder.in_features), "B": torch.randn(64, 2)}
        lora = {f"transformer.context_embedder.lora_{part}.weight": x for part, x in weights.items()}
        for each in (pipe, alone):
            each.load_lora_weights(dict(lora))
        CopyingGroup.copies = 0
        assert torch.equal(draw(pipe, "flux"), draw(alone, "flux"))
        assert CopyingGroup.copies == len(tensors_of(pipe.vae.decoder))


@torch.no_grad()
def test_offloaded_vae_has_a_device_and_may_be_compiled():
    pipe, latents = make("flux"), torch.randn(1, 16, 9, 7)
    latents = latents[:, : pipe.vae.config.latent_channels]
    expected = pipe.vae.decode(latents).sample
    parallelize_pipe(pipe, vae_placement="offload")
    with mock.patch.object(pipe.vae._diffusers_hook.get_hook("group_offloading").config, "onload_device", "there"):
        assert pipe._execution_device == pipe.vae.device == "there"
    decode = torch.compile(pipe.vae.decode, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"vae\.decoder\.compile"):
        decode(latents)
    torch.compiler.reset()
    pipe.vae.decoder.compile(backend="eager", fullgraph=True)
    assert torch.equal(pipe.vae.decode(latents).sample, expected)
    unparallelize_pipe(pipe)
    assert pipe._execution_device == pipe.vae.device == torch.device("cpu")
