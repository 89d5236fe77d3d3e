"""Models of all structures under their plans: on any mesh, eager and in graphs, equal to the unmodified model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from para_core import Attention, Gather, Halo, LinearAttention, Plan, Split
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.plan import AttentionByHeads
from tests.adapters.propose.models import attend
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer, relative_error
from zoo.tiny.base import fill, noise


@dataclass
class Example:
    """A model, its plan, the arguments of each call, and the unmodified model if it is another one."""

    model: Callable[[], nn.Module]
    plan: Any
    calls: Callable[[], Iterable[Any]]
    reference: Callable[[], nn.Module] | None = None
    learns: bool = False


class RotatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, hidden_states: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = self.project(hidden_states).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q * rotation, k * rotation, v)
        return hidden_states + out.transpose(1, 2).flatten(2)


class Rotation(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        return torch.linspace(-1, 1, hidden_states.shape[1])[:, None], torch.ones(())


class Model(nn.Module):
    """A model whose tokens are split at its first block, as Wan's are, and a rotation where a module makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation()
        self.blocks = nn.ModuleList([RotatedBlock(), RotatedBlock()])
        self.proj_out = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # Before the split all ranks compute the same, so nothing may be rerouted.
        hidden_states = hidden_states + F.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states)
        rotation, _ = self.rotation(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, rotation)
        out = self.proj_out(hidden_states)
        # After the gather all ranks compute the same again, so nothing may be rerouted.
        return out + F.scaled_dot_product_attention(out, out, out)


def cut(dim: int = 1, dims: int = 3, output: bool = False) -> Any:
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


GATHER = ContextParallelOutput(gather_dim=1, expected_dims=3)
INSIDE = {"rotation": {0: cut(dim=0, dims=2, output=True)}, "blocks.0": {"hidden_states": cut()}, "proj_out": GATHER}


def tokens(num: int) -> Tensor:
    return noise(2, num, 8)


class LinearAttend(nn.Module):
    """Linear attention, plus a sum over tokens as input of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.project(tokens).chunk(3, dim=2))
        normal = 1 / (F.relu(k).sum(dim=2, keepdim=True).transpose(1, 2) @ F.relu(q) + 1)
        states = torch.matmul(v, F.relu(k).transpose(1, 2))
        return (torch.matmul(states, F.relu(q)) * normal).transpose(1, 2)


class OfRows(nn.Module):
    """A model of images ``[B, 3, H, W]`` with patches of 2 × 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.attend = LinearAttend()
        self.mix = nn.Conv2d(6, 6, 5, padding=2, groups=6)
        self.out = nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, image: Tensor, residual: Tensor) -> Tensor:
        x = self.patches(image)
        height, width = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2) + residual
        tokens = tokens + self.attend(tokens)
        x = tokens.transpose(1, 2).unflatten(2, (height, width))
        return self.out(x + self.mix(input=x))


ROWS = Plan(
    inputs={
        "image": Split(dim=2, segment="rows", per=2),
        # Its shape is [B, H · W, C].
        "residual": Split(dim=-2, like="rows", per=None),
    },
    outputs={"": Gather(dim=-2, segment="rows", per=None)},
    joint_order=("rows",),
    halos={"mix": Halo(dim=2, segment="rows", size=2)},
    attention={"attend": LinearAttention("rows", sums=(("sum", 0), ("matmul", 1)))},
)


def rows(*numbers: int) -> list[dict[str, Tensor]]:
    return [{"image": noise(2, 3, 2 * num, 6), "residual": noise(2, num * 3, 6)} for num in numbers]


class Heads(nn.Module):
    """Attention whose keys are centred over all tokens, and kept for later calls if ``kept`` is given."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(20, 4 * heads) for _ in range(3))
        self.out = nn.Linear(4 * heads, 20)

    def forward(self, x: Tensor, kept: Any = None, start: int = 0) -> Tensor:
        q, k, v = (project(x).unflatten(2, (self.heads, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        k = k - k.mean(dim=2, keepdim=True)
        if kept is None:
            out = flex_attention(q, k, v)
        else:
            end = start + k.shape[2]
            kept["k"][:, :, start:end], kept["v"][:, :, start:end] = k, v
            out = F.scaled_dot_product_attention(q, kept["k"][:, :, :end], kept["v"][:, :, :end])
        return x + self.out(input=out.transpose(1, 2).flatten(2))


class OfHeads(nn.Module):
    def __init__(self, *heads: int) -> None:
        super().__init__()
        # Modules with different numbers of heads must not share a wrapper.
        self.blocks = nn.ModuleList([Heads(number) for number in heads])

    def forward(self, x: Tensor, caches: Any = None, start: int = 0) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index], start)
        return x


BY_HEADS = AttentionByHeads("tokens", ("q", "k", "v"), "out")
HEADS = Plan(
    inputs={"x": Split(dim=1, segment="tokens")},
    outputs={"": Gather(dim=1, segment="tokens")},
    joint_order=("tokens",),
    attention={"blocks.*": BY_HEADS},
)
CACHED_HEADS = replace(HEADS, attention={"blocks.*": replace(BY_HEADS, caches=(("kept", 1),))})


def chunks(*lengths: int) -> Iterable[Any]:
    caches = [{name: torch.zeros(2, 5, sum(lengths), 4) for name in "kv"} for _ in range(2)]
    for index, length in enumerate(lengths):
        yield {"x": noise(2, length, 20), "caches": caches, "start": sum(lengths[:index])}


class Fused(nn.Module):
    """Attention with one projection of 3 parts and 3 heads, of which either may come first."""

    def __init__(self, parts_dim: int) -> None:
        super().__init__()
        self.parts_dim, self.heads = parts_dim, 3
        self.qkv, self.out = nn.Linear(20, 36), nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (3, self.heads, 4) if self.parts_dim == 2 else (self.heads, 3, 4)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(2, sizes).unbind(self.parts_dim))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def fused(parts_dim: int, parts: Any) -> Example:
    by_heads = AttentionByHeads("tokens", ("qkv",), "out", parts=parts)
    plan = replace(HEADS, inputs={"input": Split(dim=1, segment="tokens")}, attention={"0": by_heads})
    return Example(lambda: nn.Sequential(Fused(parts_dim)), plan, lambda: [[noise(2, num, 20)] for num in (7, 3)])


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor, context: Tensor, cache: Any = None) -> Tensor:
        k, v = self.kv(context).chunk(2, dim=2)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return attend(self.q(x), k, v)


WITH_A_CACHE = replace(HEADS, inputs=dict.fromkeys(("x", "context"), Split(1, segment="tokens")), attention={})


def with_a_cache() -> Iterable[Any]:
    cache = DynamicCache()
    return [{"x": noise(2, num, 16), "context": noise(2, num, 16), "cache": cache} for num in (7, 5, 1)]


class CrossBlock(nn.Module):
    """Image tokens attend to each other, and then to replicated text."""

    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = CrossAttention(), CrossAttention()

    def forward(self, x: Tensor, text: Tensor, inside: bool = False) -> Tensor:
        if not inside:
            x = x + self.attn1(x, x).tanh()
            return x + self.attn2(x, text).sin()
        # The input kept by the second checkpoint depends on the first.
        x = x + checkpoint(self.attn1, x, x, use_reentrant=False).tanh()
        return x + checkpoint(self.attn2, x, text, use_reentrant=True).sin()


class Checkpointed(nn.Module):
    """A video transformer in outline, which calls torch.utils.checkpoint as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gradient_checkpointing = way, True  # A flag without the function that diffusers sets.
        self.blocks, self.last = nn.ModuleList([CrossBlock(), CrossBlock()]), nn.Linear(16, 16)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image.requires_grad_()
        with torch.no_grad():  # Only the checkpoints of this call are to be found from here.
            text = text * 1
        for block in self.blocks:
            if self.way == "none":
                image = block(image, text)
            else:
                image = checkpoint(block, image, text, self.way == "inside", use_reentrant=self.way == "reentrant")
        return self.last(image)


CROSS = Plan(
    inputs={"image": Split(dim=1, segment="image")},
    outputs={"last": Gather(dim=1, segment="image")},
    joint_order=("image",),
    attention={"blocks.*.attn2": (Attention(("image",), keys=("text",)),)},
    refused={"audio": "the model has no such parameter"},
)


def checkpointed(way: str) -> Example:
    # The text is as long as a rank's part of the image, so only the plan can tell them apart.
    def calls() -> Any:
        return [{"image": noise(2, 7, 16), "text": noise(2, 4, 16)}]

    return Example(lambda: Checkpointed(way), CROSS, calls, lambda: Checkpointed("none"), learns=True)


EXAMPLES = {
    "cut inside": Example(Model, INSIDE, lambda: [[tokens(num)] for num in (11, 11, 6)]),
    "flux, published": Example(
        flux_transformer,
        FluxTransformer2DModel._cp_plan,
        lambda: [flux_inputs(*s) for s in ((63, 13), (1, 1), (10, 5))],
    ),
    "rows": Example(OfRows, ROWS, lambda: rows(8, 11, 2), learns=True),
    "heads": Example(lambda: OfHeads(4, 3), HEADS, lambda: [[noise(2, num, 20)] for num in (7, 3)]),
    # A segment of fewer than two tokens per rank is replicated.
    "cached heads": Example(lambda: OfHeads(5, 5), CACHED_HEADS, lambda: chunks(9, 1, 3)),
    "with a cache": Example(CrossAttention, WITH_A_CACHE, with_a_cache),
    "fused, parts first": fused(2, 3),
    "fused, heads first": fused(3, 1),
    "checkpoint, none": checkpointed("none"),
    "checkpoint, reentrant": checkpointed("reentrant"),
    "checkpoint, inside": checkpointed("inside"),
}
CASES = [
    *[(name, (1, 2), "no") for name in EXAMPLES if name != "rows"],
    *[(name, (2, 1), "no") for name in ("heads", "checkpoint, inside", "checkpoint, reentrant")],
    # On these meshes (ring × Ulysses) neighbours are in one group, in the other, or in both.
    *[(name, shape, "no") for name in ("rows", "cached heads") for shape in ((3, 1), (2, 2))],
    *[(name, (1, 2), "whole") for name in ("cut inside", "with a cache")],
    ("cut inside", (2, 1), "blocks replaced"),
    *[("checkpoint, none", (1, ranks), f"in a checkpoint, {way}") for ranks in (1, 2) for way in ("reentrant", "not")],
]


def call(model: nn.Module, args: Any) -> Tensor:
    out = model(**args) if isinstance(args, dict) else model(*args)
    return getattr(out, "sample", out)


def gradients(out: Tensor, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    out.square().mean().backward()  # A reentrant checkpoint refuses torch.autograd.grad.
    return [parameter.grad for parameter in model.parameters()]


def compare(name: str, shape: tuple[int, int], compiled: str) -> list[float]:
    """Return the relative errors of the outputs of all calls, of the gradients, and of calls after removal."""
    example = EXAMPLES[name]
    torch.set_grad_enabled(example.learns)
    model = fill(example.model(), seed=1).requires_grad_(example.learns)
    reference = fill((example.reference or example.model)(), seed=1).requires_grad_(example.learns)
    if compiled == "blocks replaced":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
    apply_plan(model, example.plan, sequence_mesh(cpu_mesh(*shape)), on_one_rank=True)
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled == "whole" else model
    if compiled.startswith("in a checkpoint"):
        reentrant = compiled.endswith("reentrant")

        def called(image: Tensor, text: Tensor) -> Tensor:
            return checkpoint(model, image.requires_grad_(), text, use_reentrant=reentrant)

    errors = []
    for args, others in zip(example.calls(), example.calls(), strict=True):
        out, expected = call(called, args), call(reference, others)
        errors.append(relative_error(out.detach(), expected.detach()))
        if example.learns:
            for gradient, whole in zip(gradients(out, model), gradients(expected, reference), strict=True):
                # Every rank computes the loss of the whole output, so gradients are averaged.
                dist.all_reduce(gradient)
                # The bound of a gradient is ten times that of an output.
                errors.append(relative_error(gradient / dist.get_world_size(), whole) / 10)
    if name == "heads":
        # A block that is called by itself computes on all heads.
        errors.append(relative_error(model.blocks[0](noise(2, 7, 20)), reference.blocks[0](noise(2, 7, 20))))
    remove_plan(model)
    assert type(model) is type(reference)
    args, others = (next(iter(example.calls())) for _ in range(2))
    return [*errors, relative_error(call(model, args).detach(), call(reference, others).detach())]


@pytest.mark.parametrize(("name", "shape", "compiled"), CASES)
def test_planned_model_equals_the_unmodified_one(rank_pool, name, shape, compiled):
    for errors in rank_pool.run(compare, math.prod(shape), name, shape, compiled):
        assert max(errors) < 1e-5, errors
