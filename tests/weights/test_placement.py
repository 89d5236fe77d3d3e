"""Text encoders, VAEs and blocks that wait in host memory or run on one rank give the unmodified pipeline's results."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from diffusers.utils import scale_lora_layers, unscale_lora_layers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor import DTensor

from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    remove_cache_from_pipe,
    shard_weights,
    unparallelize_pipe,
)
from para_core.adapters.inspect.block_stack import stack_of
from para_core.adapters.models.flux import FLUX
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.adapters.weights.host_block import HostBlock
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from tests.adapters.parallel.unchanged import same_pipe
from tests.tiny import relative_error
from tests.together.snapshot import differences, snapshot
from tests.weights.pipes import add_lora, encoders, generate, make, mesh_of


class CopyingGroup(ModuleGroup):
    """A group as on CUDA, which copies weights from host memory. It counts copied tensors."""

    copies = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "stream": mock.Mock(), "record_stream": True})

    @staticmethod
    def _to_cpu(tensor, low_cpu_mem_usage):
        return tensor.data.clone()

    def _onload_from_memory(self):
        for x, held in self.cpu_param_dict.items():
            x.data = held.clone()
            CopyingGroup.copies += 1


def copying():
    """Make diffusers' group offload copy weights on a CPU in this context as it does on CUDA."""
    return mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup)


def draw(pipe, name="flux", **options):
    """Return an image, so that the VAE runs too."""
    return generate(pipe, name, output_type="pt", generator=torch.Generator().manual_seed(7), **options)


def count_calls(modules):
    """Count the calls of the first layer of each module on this rank."""
    calls = []
    for module in modules:
        layer = next(x for x in module.modules() if isinstance(x, (nn.Linear, nn.Conv2d, nn.Conv3d)))
        layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


def place(name, dims, options):
    """Compare the images, placed and undone, with the unmodified pipeline, and see where its parts run."""
    pipe, expected, rank = make(name), draw(make(name), name), dist.get_rank() if dims else 0
    encodings, decodings = count_calls(encoders(pipe).values()), count_calls([pipe.vae.decoder])
    draw(pipe, name)  # Some parts add attributes to themselves in their first call.
    before = snapshot(pipe)
    encodings.clear()
    decodings.clear()
    parallelize_pipe(pipe, mesh=mesh_of(dims) if dims else None, **options)
    images = [draw(pipe, name) for _ in range(2)]
    assert bool(encodings) == (options["text_encoders"] != "first" or rank == 0)
    assert bool(decodings) == (options.get("vae_placement") != "first" or rank == 0)
    blocks = [is_filled(x.block, Slot.OFFLOADED_BLOCK) for x in stack_of(pipe.transformer, options.get("adapter"))]
    assert blocks == [index >= options.get("resident_blocks", len(blocks)) for index in range(len(blocks))]
    # Nothing undoes sharded weights.
    if "pipe" not in dims and "fsdp" not in options.values() and not options.get("weights"):
        images.append(draw(unparallelize_pipe(pipe), name))
        changed = differences(snapshot(pipe), before)
        assert not changed, changed
    assert max(relative_error(image, expected) for image in images) < 1e-5
    assert dims or all(torch.equal(image, expected) for image in images)


FIRST = {"text_encoders": "first", "vae_placement": "first"}
OFFLOAD = {"text_encoders": "offload", "vae_placement": "offload"}
BLOCKS = {"offload": "blocks"}
# Its first block is resident, and is not the first of the library's stack.
SINGLE = replace(FLUX, blocks=CachedBlocks((BlockGroup(("single_transformer_blocks",)),)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dims", "options"),
    [
        ("wan 2.2", {}, {**OFFLOAD, **BLOCKS, "resident_blocks": 1}),
        ("flux", {"ulysses": 2}, {**FIRST, **BLOCKS, "resident_blocks": 1, "adapter": SINGLE}),
        ("flux", {"ring": 2}, {**OFFLOAD, "vae": True}),
        ("flux", {"pipe": 2}, {"text_encoders": "fsdp", "vae_placement": "first"}),
        ("flux", {"ulysses": 2}, {"weights": "fsdp", "text_encoders": "first", "vae_placement": "offload"}),
        ("flux", {"ring": 2, "tensor": 2}, {"weights": "tensor", "text_encoders": "fsdp", "vae": True}),
        ("wan 2.2", {"batch": 2}, {**FIRST, **BLOCKS, "resident_blocks": 1}),
        ("wan 2.2", {"batch": 2}, {"text_encoders": "replicate", "vae_placement": "offload"}),
    ],
)
def test_placed_parts_are_exact_and_undone(rank_pool, name, dims, options):
    if dims:
        rank_pool.run(place, prod(dims.values()), name, dims, options)
    else:
        place(name, dims, options)


def special_cases():
    """Compare images or latents by case, on two ranks."""
    expected = draw(make("flux"))
    outs = {"after refusals": (refused_on_ranks(), expected)}
    pipe = parallelize_pipe(make("flux"), mesh=mesh_of({"tensor": 2}), weights="tensor")
    assert all(any(isinstance(x, DTensor) for x in part.parameters()) for part in encoders(pipe).values())
    outs["tensor weights shard text encoders by default"] = draw(pipe), expected

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
    with pytest.raises(RuntimeError, match=r"(?s)text_encoder_2.*IndexError"):
        pipe.text_encoder_2(torch.tensor([[10**6]]))
    with pytest.raises(RuntimeError, match=r"pipe\.vae"):
        pipe.vae.decode(torch.ones(1, 3, 5, 5))
    outs["after errors of the first rank"] = draw(pipe), expected

    # Prompts that were encoded before are not encoded again.
    pipe = make("flux")
    kept = EncodedPrompts(pipe)
    parallelize_pipe(pipe, mesh=mesh_of({"ring": 2}), text_encoders="offload")
    outs["encoded prompts"] = torch.cat([draw(pipe), draw(pipe)]), torch.cat([expected] * 2)
    assert kept.hits == kept.misses == 2

    # Two pipelines share a VAE.
    for earlier, later in ((FIRST, {"vae": True}), ({"vae": True}, FIRST)):
        pipe, other = make("flux"), make("flux")
        other.vae = parallelize_pipe(pipe, mesh=mesh_of({"ulysses": 2}), **earlier).vae
        with pytest.raises(ValueError, match="vae_placement='first'"):
            parallelize_pipe(other, mesh=mesh_of({"ulysses": 2}), **later)
        outs[f"a shared VAE with {earlier}"] = torch.cat([draw(pipe), draw(other)]), torch.cat([expected] * 2)
    errors = {name: relative_error(*pair) for name, pair in outs.items()}
    assert max(errors.values()) < 1e-5, errors


def offload_a_part(name):
    """Return a change that applies diffusers' group offload to a component."""
    return lambda pipe: apply_group_offloading(getattr(pipe, name), torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (offload_a_part("text_encoder"), {"text_encoders": "offload"}, r"text_encoder .*remove_hook\(.*group_offload"),
        (lambda x: x.register_modules(text_encoder=None, text_encoder_2=None), {"text_encoders": "first"}, "no text"),
        (None, {"vae_placement": "first", "vae": True}, "first"),
        (offload_a_part("vae"), {"vae_placement": "offload"}, r"pipe\.vae"),
        (lambda pipe: pipe.register_modules(vae=None), {"vae_placement": "first"}, "autoencoder"),
        (None, {"offload": "blocks", "resident_blocks": 99}, "expected"),
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
    """Try combinations that are refused on both ranks. Return an image after them."""
    ulysses, pipe = mesh_of({"ulysses": 2}), make("flux")

    def refused(message, call, *args, error=ValueError, **options):
        with same_pipe(pipe), pytest.raises(error, match=message):
            call(pipe, *args, **options)

    refused("offload='blocks' with", parallelize_pipe, mesh=mesh_of({"pipe": 2}), **BLOCKS)
    refused("offload='blocks' with", parallelize_pipe, mesh=ulysses, weights="fsdp", **BLOCKS)
    if dist.get_rank() == 1:
        offload_a_part("text_encoder_2")(pipe)
    refused(r"pipe\.text_encoder_2 .*components=", shard_weights, ulysses)
    pipe = parallelize_pipe(make("flux"), mesh=ulysses, text_encoders="first")
    refused(r"pipe\.text_encoder .*components=", shard_weights, ulysses)
    shard_weights(pipe, ulysses, components=["transformer"])
    pipe = parallelize_pipe(make("flux"), mesh=ulysses, **BLOCKS)
    refused(r"pipe\.transformer .*components=", shard_weights, ulysses)
    pipe = shard_weights(make("flux"), ulysses)
    refused("sharded already", parallelize_pipe, error=RuntimeError, mesh=ulysses, **BLOCKS)
    return draw(pipe)


@pytest.mark.filterwarnings("ignore:.*branches of guidance")
def test_special_cases_of_placement_are_exact_or_refused_on_every_rank(rank_pool):
    rank_pool.run(special_cases, 2)


def events_of(pipe, num_steps):
    """Return the copies of blocks, what waits for them, and the runs in a generation, in order."""
    events, blocks, onload = [], [entry.block for entry in stack_of(pipe.transformer)], ModuleGroup.onload_

    def noted(group):
        events.append(("copy", blocks.index(group.modules[0])))
        onload(group)

    def waited(block):
        events.append(("wait", blocks.index(block.module)))

    for index, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, index=index: events.append(("run", index)))
    with mock.patch.object(ModuleGroup, "onload_", noted), mock.patch.object(HostBlock, "wait", waited):
        generate(pipe, "flux", num_inference_steps=num_steps)
    return events


def test_each_block_is_copied_while_the_one_before_runs_and_not_in_a_skipped_step():
    pipe = parallelize_pipe(make("flux"), **BLOCKS, resident_blocks=0)
    last, events = len(stack_of(pipe.transformer)) - 1, events_of(pipe, 1)
    for index in range(last):
        assert events.index(("wait", index)) < events.index(("copy", index + 1)) < events.index(("run", index))
    parallelize_pipe(pipe, **BLOCKS)
    assert sum(kind == "copy" for kind, _ in events_of(pipe, 2)) == 2 * last
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    num_copies = sum(kind == "copy" for kind, _ in events_of(pipe, 6))
    assert 0 < cache_report(pipe).computed < 6
    assert num_copies == cache_report(pipe).computed * last


def scale(pipe):
    for entry in stack_of(pipe.transformer):
        for x in (*entry.block.parameters(), *entry.block.buffers()):
            x.data.mul_(1.25)


CHANGES = {
    "scaled": [scale],
    "loaded": [lambda x: x.transformer.load_state_dict({k: v / 2 for k, v in x.transformer.state_dict().items()})],
    "moved": [lambda pipe: pipe.to("cpu")],
    "LoRA": [add_lora, lambda pipe: pipe.transformer.set_adapters("default", 0.5)],
    "fused": [lambda pipe: (add_lora(pipe), pipe.transformer.fuse_lora())],
}


@pytest.mark.parametrize(
    ("change", "state"), [*[(change, "computed") for change in CHANGES], ("scaled", "skipped"), ("scaled", "failed")]
)
def test_weights_changed_after_a_call_are_used_in_all_steps(change, state):
    pipe, plain = make("flux"), make("flux")
    with copying():
        parallelize_pipe(pipe, **BLOCKS, resident_blocks=0 if state == "skipped" else 1)
        if state == "skipped":
            # The last step is skipped after the first block, when the second one was already copied.
            apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=1, warmup_steps=1)
        if state == "failed":
            handle = stack_of(pipe.transformer)[2].block.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generate(pipe, "flux")
            handle.remove()
        else:
            generate(pipe, "flux", num_inference_steps=4 if state == "skipped" else 1)
        remove_cache_from_pipe(pipe)
        for step in CHANGES[change]:
            step(pipe)
            step(plain)
            expected = generate(plain, "flux")
            assert torch.equal(generate(pipe, "flux"), expected)
        unparallelize_pipe(pipe)
    assert torch.equal(generate(pipe, "flux"), expected)


@torch.no_grad()
def test_offloaded_vae_stays_so_with_a_lora_and_may_be_compiled():
    pipe, alone = make("flux"), make("flux")
    latents = torch.randn(1, pipe.vae.config.latent_channels, 9, 7)
    with copying():
        parallelize_pipe(pipe, vae_placement="offload")
        # diffusers then applies its group offload again, to all components that seem to have it.
        shapes = {"A": (2, alone.transformer.context_embedder.in_features), "B": (64, 2)}
        weights = {f"transformer.context_embedder.lora_{k}.weight": torch.randn(x) for k, x in shapes.items()}
        for each in (pipe, alone):
            each.load_lora_weights(dict(weights))
        CopyingGroup.copies = 0
        assert torch.equal(draw(pipe), draw(alone))
        assert CopyingGroup.copies == len([*pipe.vae.decoder.parameters(), *pipe.vae.decoder.buffers()])
        with mock.patch.object(pipe.vae._diffusers_hook.get_hook("group_offloading").config, "onload_device", "there"):
            assert pipe._execution_device == pipe.vae.device == "there"
    decode = torch.compile(pipe.vae.decode, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"vae\.decoder\.compile"):
        decode(latents)
    torch.compiler.reset()
    pipe.vae.decoder.compile(backend="eager", fullgraph=True)
    assert torch.equal(pipe.vae.decode(latents).sample, alone.vae.decode(latents).sample)
    unparallelize_pipe(pipe)
    assert pipe._execution_device == pipe.vae.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["flux", "hunyuan"])
def test_equal_prompts_are_encoded_once(name):
    pipe = make(name)
    kept, calls, lengths = EncodedPrompts(pipe), count_calls(encoders(pipe).values()), []
    for options in ({}, {}, {"prompt": "two red dogs run"}, {"prompt": "two red dogs run", "max_sequence_length": 5}):
        if name == "flux" or "max_sequence_length" not in options:
            assert torch.equal(generate(pipe, name, **options), generate(make(name), name, **options))
            lengths.append(len(calls))
    assert 0 < lengths[0] == lengths[1] < lengths[2]
    # CLIP takes no max_sequence_length, so its output for the last prompt was cached before.
    assert name != "flux" or (lengths, kept.hits, kept.misses) == ([2, 2, 4, 5], 3, 5)


@torch.no_grad()
def test_the_least_recently_used_output_is_dropped():
    encoder = make("flux").text_encoder_2
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"], init_lora_weights=False), encoder)
    kept = EncodedPrompts(SimpleNamespace(text_encoder=encoder))
    encoder(torch.tensor([[1, 2, 3]]))
    size = kept.bytes
    kept.max_bytes = 2 * size + 1
    for token, factor, misses in ((2, 1, 2), (1, 1, 2), (3, 1, 3), (1, 1, 3), (2, 1, 4), (2, 0.3, 5), (2, 0.3, 5)):
        scale_lora_layers(encoder, factor)
        encoder(torch.tensor([[token, 2, 3]]))
        unscale_lora_layers(encoder, factor)
        assert kept.misses == misses
        assert kept.bytes <= 2 * size
    kept.max_bytes = 0
    for _ in range(2):
        encoder(torch.tensor([[7, 2, 3]]))
    assert kept.misses == 7
    with pytest.raises(ValueError, match="-1"):
        EncodedPrompts(make("flux"), -1)


def test_changes_of_an_output_are_not_kept():
    pipe, ids = make("flux"), torch.tensor([[1, 2, 3]])
    kept = EncodedPrompts(pipe)
    with torch.no_grad():
        first = pipe.text_encoder_2(ids)[0]
        expected = first.clone()
        first.zero_()
        pipe.text_encoder_2(ids)[0].zero_()
        assert torch.equal(pipe.text_encoder_2(ids)[0], expected)
    pipe.text_encoder_2.requires_grad_()
    assert pipe.text_encoder_2(ids)[0].requires_grad
    kept.remove()
    assert kept.bytes == 0
    assert type(pipe.text_encoder_2) is type(make("flux").text_encoder_2)
