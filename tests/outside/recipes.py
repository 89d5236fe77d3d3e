"""Recipes. Each runs one model of another library on the ranks of a mesh, with code that a user would write.

docs/any_model.md shows them and gives their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from para_core import (
    ContextParallelConfig,
    Gather,
    Plan,
    Replicate,
    Segment,
    SequenceLayout,
    Split,
    UnifiedAttnMode,
    apply_context_parallel,
    remove_context_parallel,
)
from para_core.adapters import propose_plan
from tests.modes.fake_flash_attn import flash_attn_func
from tests.outside import official
from tests.outside.inputs import IMAGE_TOKENS, VIDEO_TOKENS, build, inputs_of

Inputs = dict[str, Any]
Run = Callable[[nn.Module, Inputs, DeviceMesh], Tensor]


@dataclass(frozen=True)
class Recipe:
    """A model, and one way to run it on several ranks.

    Args:
        model: a name of :data:`BUILDERS`, which also fixes the inputs.
        way: what the user does, for the table of the page.
        run: a function that every rank calls, and that returns the whole output.
        alone: a function that returns the same output of the unmodified model on one device.
    """

    model: str
    way: str
    run: Run
    alone: Callable[[nn.Module, Inputs], Tensor] = field(default=lambda model, inputs: tensor_of(model(**inputs)))

    @property
    def name(self) -> str:
        return f"{self.model}: {self.way}"


def expected(recipe: Recipe) -> Tensor:
    """Return the output of the unmodified model on one device."""
    with torch.no_grad():
        return recipe.alone(build(recipe.model), inputs_of(recipe.model))


def on_mesh(recipe: Recipe, mesh: DeviceMesh) -> Tensor:
    """Return the output of the recipe on the ranks of ``mesh``. Every rank calls it."""
    with torch.no_grad():
        return recipe.run(build(recipe.model), inputs_of(recipe.model), mesh)


def tensor_of(output: Any) -> Tensor:
    """Return the tensor of a model's output."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- In the mode, with tokens sharded where they are arguments.


def flux(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    with UnifiedAttnMode(mesh) as cp:
        for name in ("img", "img_ids", "txt", "txt_ids"):
            inputs[name] = cp.shard(inputs[name], dim=1)
        return cp.gather(model(**inputs), dim=1, sequence=cp.sequence(IMAGE_TOKENS))


def token_ids(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    with UnifiedAttnMode(mesh) as cp:
        out = model(input_ids=cp.shard(ids, dim=1), position_ids=cp.shard(positions, dim=1), use_cache=False)
        return cp.gather(out.last_hidden_state, dim=1)


# -- In the mode, with tokens sharded by hooks between the embedding and the first block.


def between(first: str, last: str) -> Run:
    """Return a recipe that shards the first argument of module ``first`` and gathers the output of module ``last``."""

    def run(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
        with UnifiedAttnMode(mesh) as cp:
            before, after = model.get_submodule(first), model.get_submodule(last)
            shard = before.register_forward_pre_hook(lambda _, args: (cp.shard(args[0], dim=1), *args[1:]))
            gather = after.register_forward_hook(lambda _, args, x: cp.gather(tensor_of(x), dim=1))
            with hooked(shard, gather):
                return tensor_of(model(**inputs))

    return run


def sd35(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    with UnifiedAttnMode(mesh) as cp:
        shard = model.joint_blocks[0].register_forward_pre_hook(
            lambda _, args: tuple(cp.shard(x, dim=1) for x in args)  # The arguments are context and x.
        )
        gather = model.final_layer.register_forward_hook(
            lambda _, args, x: cp.gather(x, dim=1, sequence=cp.sequence(IMAGE_TOKENS))
        )
        with hooked(shard, gather):
            return model(**inputs)


def comfy(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    lengths = [inputs["context"].shape[1], IMAGE_TOKENS]
    with UnifiedAttnMode(mesh) as cp:
        shard = partial(cp.shard, dim=1)
        handles = (
            model.img_in.register_forward_hook(lambda _, args, x: shard(x)),
            model.txt_in.register_forward_hook(lambda _, args, x: shard(x)),
            model.pe_embedder.register_forward_pre_hook(
                lambda _, args: torch.cat([shard(ids) for ids in args[0].split(lengths, dim=1)], dim=1)
            ),
            model.final_layer.register_forward_hook(
                lambda _, args, x: cp.gather(x, dim=1, sequence=cp.sequence(IMAGE_TOKENS))
            ),
        )
        with hooked(*handles):
            return model(**inputs)


def wan(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    """Run Wan with its rotary table sharded, because attention calls the rotary function with the whole grid."""
    rope_apply, length = official.rope_apply, inputs["seq_len"]
    ones = torch.zeros(1, length, 1, official.HEAD_DIM)
    ones[..., 0::2] = 1  # Rotated by rope_apply, 1 + 0i gives the table itself.
    with UnifiedAttnMode(mesh) as cp:

        def sharded_rope(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
            table = cp.shard(rope_apply(ones, grid_sizes, freqs), dim=1)
            return official.rotate(x, table[..., 0::2], table[..., 1::2])

        handles = (
            model.blocks[0].register_forward_pre_hook(lambda _, args: (cp.shard(args[0], dim=1),)),
            model.text_embedding.register_forward_hook(lambda _, args, text: cp.replicated(text)),
            model.head.register_forward_hook(lambda _, args, x: cp.gather(x, dim=1, sequence=cp.sequence(length))),
        )
        with hooked(*handles), mock.patch.object(official, "rope_apply", sharded_rope):
            return tensor_of(model(**inputs))


# -- With a plan written by hand.


def planned(model: nn.Module, inputs: Inputs, mesh: DeviceMesh, plan: Plan) -> Tensor:
    apply_context_parallel(model, ContextParallelConfig(mesh=mesh), plan)
    try:
        return tensor_of(model(**inputs))
    finally:
        remove_context_parallel(model)


VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=0, like="video")
HUNYUAN_PLAN = Plan(
    inputs={},
    inner={
        "double_blocks.0": {"img": VIDEO, "txt": Replicate(dim=1, segment="text")},
        "double_blocks.*": {"freqs_cis": POSITIONS},
        "single_blocks.*": {"freqs_cis": POSITIONS},
    },
    outputs={"single_blocks.-1": Gather(dim=1, segment="video", then_replicated=True)},
    joint_order=("video", "text"),
)
MOCHI_PLAN = Plan(
    inputs={},
    inner={"blocks.0": {"x": VIDEO}, "blocks.*": {"rope_cos": POSITIONS, "rope_sin": POSITIONS}},
    outputs={"final_layer": Gather(dim=1, segment="video")},
    joint_order=("video", "text"),
)


def flash_of_all(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
    """Attend to all tokens in place of HunyuanVideo's ``attention``. Without padding, flash_attn needs no lengths."""
    return flash_attn_func(q, k, v).flatten(2)


def hunyuan(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    """Run HunyuanVideo with the text cut to its valid tokens. No returned token attends to the other ones."""
    valid = int(inputs["text_mask"].sum())
    inputs["text_states"], inputs["text_mask"] = inputs["text_states"][:, :valid], inputs["text_mask"][:, :valid]
    with mock.patch.object(official, "attention", flash_of_all):
        return planned(model, inputs, mesh, HUNYUAN_PLAN)


def mochi(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    # The indices are those of valid tokens among the tokens of this rank: its part of the video, and all text.
    layout = SequenceLayout((Segment("video", VIDEO_TOKENS),), ranks=mesh.size())
    (mask,) = inputs["y_mask"]
    inputs["packed_indices"] = official.compute_packed_indices(mask, layout.size(dist.get_rank()))
    return planned(model, inputs, mesh, MOCHI_PLAN)


@cache
def proposed_plan(name: str) -> Plan | None:
    """Return the plan that ``propose_plan`` finds from calls of two lengths, or one call of DiT."""
    examples = (inputs_of(name),) if name == "DiT" else (inputs_of(name, 0), inputs_of(name, 1))
    return propose_plan(build(name), examples).plan


def proposed_for(name: str, model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    plan = proposed_plan(name)
    assert plan is not None
    return planned(model, inputs, mesh, plan)


def proposed(model: str) -> Recipe:
    return Recipe(model, "plan, proposed", partial(proposed_for, model))


# -- Decoding with a cache, and training.


def decoded(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    """Return logits of four tokens after a prompt. A rank caches the keys of its part of it and of the answer."""
    ids = inputs["input_ids"]
    prompt, cache = Segment("prompt", ids.shape[1]), DynamicCache(config=model.config)
    positions, rows = torch.arange(prompt.total + 4)[None], []
    with UnifiedAttnMode(mesh) as cp:
        out = model(cp.shard(ids, dim=1), position_ids=cp.shard(positions[:, : prompt.total], dim=1), cache=cache)
        rows.append(cp.gather(out.logits, dim=1)[:, -1:])
        for step in range(1, 5):
            token = SequenceLayout((Segment("token", 1, replicated=True),), mesh.size())
            keys = SequenceLayout((prompt, Segment("answer", step, replicated=True)), mesh.size())
            with cp.using(token, key_layout=keys):
                position = positions[:, prompt.total + step - 1 :][:, :1]
                rows.append(model(rows[-1].argmax(-1), position_ids=position, cache=cache).logits)
    return torch.cat(rows, dim=1)


def decoded_alone(model: nn.Module, inputs: Inputs) -> Tensor:
    ids, rows = inputs["input_ids"], []
    for _ in range(5):
        rows.append(model(ids, use_cache=False).logits[:, -1:])
        ids = torch.cat([ids, rows[-1].argmax(-1)], dim=1)
    return torch.cat(rows, dim=1)


def trained(model: nn.Module, inputs: Inputs, mesh: DeviceMesh) -> Tensor:
    """Return loss and gradients of a training step. Gradients of the loss of gathered logits are averaged."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    model.requires_grad_().zero_grad()
    with torch.enable_grad(), UnifiedAttnMode(mesh) as cp:
        out = model(cp.shard(ids, dim=1), position_ids=cp.shard(positions, dim=1), use_cache=False)
        logits = cp.gather(out.logits, dim=1)
        loss = model.loss_function(logits, ids, vocab_size=model.config.vocab_size)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()
    return step_of(model, loss)


def trained_alone(model: nn.Module, inputs: Inputs) -> Tensor:
    model.requires_grad_().zero_grad()
    with torch.enable_grad():
        loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        loss.backward()
    return step_of(model, loss)


def step_of(model: nn.Module, loss: Tensor) -> Tensor:
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    model.requires_grad_(False)
    return torch.cat([loss.detach()[None], *gradients])


MODE, HOOKS = "mode, inputs sharded", "mode, hooks"
RECIPES = [
    Recipe("Qwen3", MODE, token_ids),
    proposed("ModernBERT, sliding window"),
    proposed("Llama, padded"),
    Recipe("Llama, decoding", "mode, cp.using", decoded, decoded_alone),
    Recipe("Llama, training", "mode, gradients averaged", trained, trained_alone),
    Recipe("FLUX", MODE, flux),
    proposed("FLUX"),
    Recipe("Wan 2.1", "mode, hooks, one function replaced", wan),
    Recipe("HunyuanVideo", "plan, one function replaced", hunyuan),
    Recipe("Mochi", "plan", mochi),
    Recipe("Stable Diffusion 3.5", HOOKS, sd35),
    proposed("Stable Diffusion 3.5"),
    Recipe("DiT", HOOKS, between("blocks.0", "blocks.1")),
    proposed("DiT"),
    Recipe("timm ViT", HOOKS, between("blocks", "blocks")),
    proposed("timm ViT"),
    Recipe("ComfyUI's FLUX", HOOKS, comfy),
    proposed("ComfyUI's FLUX"),
]
