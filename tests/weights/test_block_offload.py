"""Blocks in host memory give the bits of the unmodified pipeline, in any order with other options."""

from itertools import permutations
from math import prod
from unittest import mock

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from peft import LoraConfig
from torch import nn

from para_core import init_context_parallel_mesh
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
from tests.tiny import relative_error
from tests.weights.copying_group import CopyingGroup
from tests.weights.pipes import generate, make
from tests.weights.test_lora import require_as, state_of


def attributes_of(module):
    return [(type(x), sorted(vars(x))) for x in module.modules()]


def mesh_of(dims):
    return init_context_parallel_mesh("cpu", **{f"max_{name}_dim_size": size for name, size in dims.items()})


def place(name, dims, resident):
    pipe = make(name)
    generate(pipe, name)  # diffusers adds a registry of hooks to a transformer in its first call.
    before, attributes = state_of(pipe), attributes_of(pipe.transformer)
    parallelize_pipe(pipe, mesh=mesh_of(dims) if dims else None, offload="blocks", resident_blocks=resident)
    blocks = [is_filled(entry.block, Slot.OFFLOADED_BLOCK) for entry in stack_of(pipe.transformer)]
    outs = [generate(pipe, name) for _ in range(2)]
    unparallelize_pipe(pipe)
    outs.append(generate(pipe, name))
    require_as(pipe, before)
    return outs, blocks, attributes == attributes_of(pipe.transformer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flux", "wan 2.2", "hunyuan"])
def test_offloaded_blocks_of_one_rank_give_the_same_bits(name):
    expected = generate(make(name), name)
    outs, blocks, undone = place(name, {}, 1)
    assert all(torch.equal(out, expected) for out in outs)
    assert blocks == [False, *[True] * (len(blocks) - 1)]
    assert undone


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dims", "resident"),
    [("flux", {"ulysses": 2}, 0), ("wan 2.2", {"batch": 2}, 1), ("flux", {"ring": 2, "ulysses": 2}, 2)],
)
def test_offloaded_blocks_are_exact_on_ranks_and_undone(rank_pool, name, dims, resident):
    expected = generate(make(name), name)
    for outs, blocks, undone in rank_pool.run(place, prod(dims.values()), name, dims, resident):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert blocks.index(True) == resident
        assert undone


def add_lora(pipe):
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(pipe.transformer.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


STEPS = {
    "cache": lambda pipe: apply_cache_on_pipe(pipe, residual_diff_threshold=0.0),
    "lora": add_lora,
    "parallel": lambda pipe: parallelize_pipe(
        pipe, mesh=mesh_of({"ulysses": 2}), offload="blocks", text_encoders="offload"
    ),
}


def in_all_orders():
    outs = {}
    for order in permutations(STEPS):
        pipe = make("flux")
        for name in order:
            STEPS[name](pipe)
        outs[order, "offloaded"] = generate(pipe, "flux")
        unparallelize_pipe(pipe)
        remove_cache_from_pipe(pipe)
        outs[order, "undone"] = generate(pipe, "flux")
    return outs


@pytest.mark.long
def test_offloaded_blocks_are_exact_in_any_order_with_cache_and_lora(rank_pool):
    pipe = make("flux")
    add_lora(pipe)
    expected = generate(pipe, "flux")
    for outs in rank_pool.run(in_all_orders, 2):
        errors = {key: relative_error(out, expected) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


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
@pytest.mark.parametrize("order", [("offload", "compile"), ("compile", "offload")])
def test_compiled_blocks_are_whole_graphs(order):
    expected, pipe = generate(make("flux"), "flux"), make("flux")
    for name in order:
        if name == "offload":
            parallelize_pipe(pipe, offload="blocks")
        else:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative_error(generate(pipe, "flux"), expected) < 1e-5
    unparallelize_pipe(pipe)
    assert relative_error(generate(pipe, "flux"), expected) < 1e-5


@pytest.mark.long
def test_a_transformer_in_one_graph_is_refused():
    pipe = parallelize_pipe(make("flux"), offload="blocks")
    pipe.transformer.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile_repeated_blocks"):
        generate(pipe, "flux")


def test_weights_that_change_between_two_calls_are_used():
    pipe, plain = make("flux"), make("flux")
    parallelize_pipe(pipe, offload="blocks")
    generate(pipe, "flux")
    for change in (add_lora, lambda pipe: pipe.transformer.set_adapters("default", 0.5), lambda pipe: pipe.to("cpu")):
        for changed in (pipe, plain):
            change(changed)
        assert torch.equal(generate(pipe, "flux"), generate(plain, "flux"))
    for changed in (pipe, plain):
        changed.transformer.fuse_lora()
    assert torch.equal(generate(pipe, "flux"), generate(plain, "flux"))


def scale(pipe):
    for entry in stack_of(pipe.transformer):
        for x in (*entry.block.parameters(), *entry.block.buffers()):
            x.data.mul_(1.25)


def load(pipe):
    pipe.transformer.load_state_dict({key: 0.75 * x for key, x in pipe.transformer.state_dict().items()})


CHANGES = {"scaled": scale, "loaded": load, "fused": lambda pipe: (add_lora(pipe), pipe.transformer.fuse_lora())}


@pytest.mark.parametrize(
    ("change", "state"), [*[(change, "computed") for change in CHANGES], ("scaled", "skipped"), ("scaled", "failed")]
)
def test_weights_changed_in_place_after_a_call_are_used_in_all_steps(change, state):
    pipe, plain = make("flux"), make("flux")
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, offload="blocks", resident_blocks=0 if state == "skipped" else 1)
        if state == "skipped":
            # The last step is skipped after the first block, when the second one was already copied.
            apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=1, warmup_steps=1)
        blocks = [entry.block for entry in stack_of(pipe.transformer)]
        if state == "failed":
            handle = blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generate(pipe, "flux")
            handle.remove()
        else:
            generate(pipe, "flux", num_inference_steps=4)
        remove_cache_from_pipe(pipe)
        for changed in (pipe, plain):
            CHANGES[change](changed)
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


def test_refused_offload_changes_nothing():
    pipe = make("flux")
    for options in (
        {"offload": "disk"},
        {"offload": "blocks", "resident_blocks": 99},
        {"offload": "blocks", "resident_blocks": -1},
        {"resident_blocks": -1},
    ):
        with pytest.raises(ValueError, match="expected"):
            parallelize_pipe(pipe, **options)
    for number in (4, 1, 0):
        with pytest.raises(ValueError, match=rf"resident_blocks is {number} .*offload='blocks'"):
            parallelize_pipe(pipe, resident_blocks=number)
    apply_group_offloading(pipe.transformer.transformer_blocks[1], torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(ValueError, match="transformer is offloaded"):
        parallelize_pipe(pipe, offload="blocks")
    for entry in stack_of(pipe.transformer):
        assert not is_filled(entry.block, Slot.OFFLOADED_BLOCK)


def test_a_second_pipeline_of_the_same_transformer_is_refused():
    pipe, other = make("flux"), make("flux")
    other.transformer = pipe.transformer
    parallelize_pipe(pipe, offload="blocks")
    before = attributes_of(pipe.transformer)
    with pytest.raises(ValueError, match=r"pipe\.transformer .*unparallelize_pipe"):
        parallelize_pipe(other, offload="blocks")
    assert attributes_of(pipe.transformer) == before
    parallelize_pipe(pipe, offload="blocks", resident_blocks=0)
    expected = generate(pipe, "flux")
    unparallelize_pipe(pipe)
    parallelize_pipe(other, offload="blocks")
    assert torch.equal(generate(other, "flux"), expected)


def refused_with_sharded_weights():
    pipe, errors = make("flux"), []
    for options in ({"mesh": mesh_of({"pipe": 2})}, {"mesh": mesh_of({"ulysses": 2}), "weights": "fsdp"}):
        with pytest.raises(ValueError, match="offload='blocks' with") as error:
            parallelize_pipe(pipe, offload="blocks", **options)
        errors.append(str(error.value))
    shard_weights(pipe, mesh_of({"ulysses": 2}))
    with pytest.raises(RuntimeError, match=r"sharded already.*from_pretrained"):
        parallelize_pipe(pipe, mesh=mesh_of({"ulysses": 2}), offload="blocks")
    return generate(pipe, "flux")


def test_offload_of_sharded_blocks_is_refused_on_every_rank(rank_pool):
    expected = generate(make("flux"), "flux")
    for out in rank_pool.run(refused_with_sharded_weights, 2):
        assert relative_error(out, expected) < 1e-5
