"""Plans are proposed for models whose blocks take other inputs than tensors [B, S, C]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from para_core import check_parallel
from para_core.adapters import propose_plan
from para_core.plans.plan import CumulativeLengths, Gather, Plan, Split, SplitMask
from tests.adapters.propose.test_outside import propose_exact
from zoo.tiny.base import fill


def heads_of(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Return ``parts`` tensors ``[B, 3, S, 8]`` of three heads, from ``[B, S, parts * 24]``."""
    return x.unflatten(-1, (parts, 3, 8)).permute(2, 0, 3, 1, 4).unbind()


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3)
        return x + self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


def causal_mask(text: int, video: int) -> BlockMask:
    """Return the mask for ``text`` tokens, which all tokens see, and for frames of five tokens, which see earlier
    frames.
    """
    frame = torch.cat([torch.full((text,), -1), torch.arange(video) // 5])
    total = text + video
    return create_block_mask(lambda b, h, q, k: frame[q] >= frame[k], None, None, total, total, device="cpu")


class CausalVideo(nn.Module):
    """Blocks of flex attention over text and video, with a mask that the model makes or receives."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.final = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList([FlexBlock(), FlexBlock()])

    def forward(self, video: Tensor, text: Tensor | None = None, mask: BlockMask | None = None) -> Tensor:
        x, length = self.inp(video), 0 if text is None else text.shape[1]
        mask = mask or causal_mask(length, video.shape[1])
        x = x if text is None else torch.cat([text, x], dim=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.final(x[:, length:])


def causal_inputs(tokens: int, text: int, given: bool) -> dict[str, Tensor | BlockMask]:
    generator = torch.Generator().manual_seed(tokens)
    inputs: dict[str, Tensor | BlockMask] = {"video": torch.randn(1, tokens, 6, generator=generator)}
    if text:
        inputs["text"] = torch.randn(1, text, 24, generator=generator)
    return {**inputs, "mask": causal_mask(text, tokens)} if given else inputs


# Dynamo compiles flex_attention once for each virtual rank.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("text", "given"), [(0, False), (0, True), (7, True)])
@pytest.mark.parametrize("compiled", ["no", "blocks"])
def test_plan_of_flex_attention_in_eager_code(text, given, compiled):
    model = fill(CausalVideo(), seed=1)
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    proposal = propose_plan(model, (causal_inputs(25, text, given), causal_inputs(35, text, given)))
    assert proposal.plan is not None, proposal
    assert any(isinstance(rule, SplitMask) for rule in proposal.plan.shard_rules)
    check = check_parallel(fill(CausalVideo(), seed=1), plan=proposal.plan, ranks=2, **causal_inputs(30, text, given))
    assert check.error < 1e-5, check


@dataclass(frozen=True)
class Stream:
    """The arguments of a block for tokens of one kind."""

    x: Tensor
    time: Tensor
    text: Tensor
    enabled: bool = True


@dataclass
class Holder:
    """A stream in an object that blocks change in place."""

    stream: Stream


class StreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q, self.kv, self.out = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)

    def attend(self, stream: Stream) -> Stream:
        q, k, v = heads_of(self.qkv(stream.x * (1 + stream.time)), 3)
        x = stream.x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        (q,), (k, v) = heads_of(self.q(x), 1), heads_of(self.kv(stream.text), 2)
        return replace(stream, x=x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, stream: Stream) -> Stream:
        return self.attend(stream)


class PairBlock(StreamBlock):
    """A block of two streams in two dataclasses. The second stream sees the first."""

    def __init__(self) -> None:
        super().__init__()
        self.to_video = nn.Linear(24, 48)

    def forward(self, video: Stream, audio: Stream | None) -> tuple[Stream, Stream | None]:
        video = self.attend(video)
        if audio is None:
            return video, None
        audio = self.attend(audio)
        (q,), (k, v) = heads_of(audio.x, 1), heads_of(self.to_video(video.x), 2)
        return video, replace(audio, x=audio.x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HolderBlock(StreamBlock):
    def forward(self, holder: Holder) -> Holder:
        holder.stream = self.attend(holder.stream)
        return holder


class OfStreams(nn.Module):
    """A model that takes tensors, and passes its blocks dataclasses of the given ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        block = {"pair": PairBlock, "holder": HolderBlock}.get(kind, StreamBlock)
        self.inp, self.final = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor, time: Tensor, text: Tensor, audio: Tensor | None = None) -> Any:
        stream: Any = Stream(self.inp(x), time, text)
        other = None if audio is None else Stream(audio, time[:, :1], text)
        holder = Holder(stream)
        for block in self.blocks:
            if self.kind == "pair":
                stream, other = block(stream, other)
            elif self.kind == "holder":
                holder = block(holder)
                stream = holder.stream
            elif self.kind == "made anew":
                stream = Stream(block(stream).x, 2 * time, text)
            else:
                stream = block(stream)
        return stream if self.kind == "returned" else self.final(stream.x)


class GivenStreams(OfStreams):
    def forward(self, stream: Stream) -> Any:  # type: ignore[override]
        return super().forward(stream.x, stream.time, stream.text)


def stream_inputs(kind: str, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {"x": (1, tokens, 6), "time": (1, tokens, 1), "text": (1, 8, 24), "audio": (1, 11, 24)}
    inputs = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    if kind != "pair":
        inputs.pop("audio")
    return {"stream": Stream(**inputs)} if kind == "given" else inputs


@pytest.mark.parametrize("kind", ["passed on", "made anew", "holder", "pair", "returned", "given"])
def test_plan_of_blocks_that_take_dataclasses(kind):
    model = (GivenStreams if kind == "given" else OfStreams)(kind)
    examples = stream_inputs(kind, 25), stream_inputs(kind, 37)
    proposal = propose_exact(model, examples, stream_inputs(kind, 31), ranks=(2, 3))
    assert proposal.error < 1e-5
    names = {"holder": "holder.stream", "pair": "video"}
    of_first = proposal.plan.inner["blocks.0"]
    assert of_first[f"{names.get(kind, 'stream')}.x"] == Split(1, segment="image")


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate ``x`` ``[..., S, 8]`` by ``angles`` ``[S, 4]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Rotary(nn.Module):
    """A rotary embedding inside attention. It makes a table with a row for each token from the number of tokens."""

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.register_buffer("table", None if tokens is None else self.angles(tokens))

    def angles(self, tokens: int) -> Tensor:
        return torch.linspace(0.1, 5.0, tokens)[:, None] * torch.tensor([1.0, 0.4, 0.2, 0.1])

    def forward(self, x: Tensor) -> Tensor:
        return turned(x, self.angles(x.shape[-2]) if self.table is None else self.table)


class RotaryBlock(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.rotary = nn.Linear(24, 72), nn.Linear(24, 24), rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3)
        out = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Rotated(nn.Module):
    """The structure of RAE."""

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.inp, self.final = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList([RotaryBlock(Rotary(tokens)), RotaryBlock(Rotary(tokens))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


def tokens_of(length: int, samples: int = 1) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, length, 6, generator=torch.Generator().manual_seed(length))}


@pytest.mark.parametrize("tokens", [None, 25])
def test_rotary_module_inside_attention_is_given_all_tokens(tokens):
    examples = (tokens_of(25),) if tokens else (tokens_of(25), tokens_of(37))
    proposal = propose_exact(Rotated(tokens), examples, tokens_of(tokens or 31), ranks=(2, 3))
    assert proposal.plan.inner["blocks.*.rotary"] == {"x": Gather(-2, "image"), 0: Split(-2, like="image")}


class OfPatches(nn.Module):
    """The structure of DINOv3: the rotary table has rows for patches only. Other tokens come after them, or
    ``before``.
    """

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.before = before
        self.inp, self.others = nn.Linear(6, 24), nn.Parameter(torch.randn(1, 3, 24))
        self.blocks, self.norm = nn.ModuleList([OfPatchesBlock(before), OfPatchesBlock(before)]), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.others.expand(len(x), -1, -1), self.inp(x)]
        angles = Rotary().angles(x.shape[1])
        x = torch.cat(parts if self.before else parts[::-1], dim=1)
        for block in self.blocks:
            x = block(x, (angles, 2 * angles))
        return self.norm(x)


class OfPatchesBlock(nn.Module):
    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3)
        patches = angles[0].shape[0]
        sizes = [x.shape[1] - patches, patches] if self.before else [patches, x.shape[1] - patches]

        def turn(t: Tensor) -> Tensor:
            parts = [*t.split(sizes, dim=2)]
            parts[self.before] = turned(turned(parts[self.before], angles[0]), angles[1])
            return torch.cat(parts, dim=2)

        return x + self.out(F.scaled_dot_product_attention(turn(q), turn(k), v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("before", "which"), [(True, "last"), (False, "first")])
def test_table_of_patches_only_is_sharded_with_their_tokens(before, which):
    model = OfPatches(before=before)
    proposal = propose_exact(model, (tokens_of(25), tokens_of(37)), tokens_of(31))
    assert proposal.plan.inner["blocks.*"]["angles"] == Split(0, like="image", only=which)
    # The first or the last of the five ranks has a single patch.
    for ranks, length in ((5, 13), (5, 4)):
        check = check_parallel(model, plan=proposal.plan, ranks=ranks, **tokens_of(length))
        assert check.error < 1e-5, check


class Mixer(nn.Module):
    """A layer that mixes tokens without attention, as in hybrids of Mamba and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inp(x).cumsum(dim=1))


class HybridLayer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.mlp = mixer, nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return x + self.mlp(x)


class Hybrid(Rotated):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HybridLayer(Mixer()), RotaryBlock(nn.Identity()), HybridLayer(Mixer())])


def test_mixer_of_a_hybrid_is_named():
    model = fill(Hybrid(), seed=1)
    examples = (tokens_of(25), tokens_of(37))
    proposal = propose_plan(model, examples)
    assert proposal.plan is None
    (question,) = proposal.questions
    assert "blocks.0.mixer (Mixer)" in question
    # The way out that the error names is exact.
    answers = {"blocks.*.mixer(x)": Gather(-2, "image"), "blocks.*.mixer(0)": Split(-2, like="image")}
    assert all(f'"{name}"' in question for name in answers)
    assert propose_plan(model, examples, answers=answers).error < 1e-5


class OwnPositions(RotaryBlock):
    """The structure of Wan: a function inside attention computes positions from a grid of all tokens."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.attn = nn.Linear(24, 24)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        height, width = grid.tolist()
        x = x.unflatten(1, (height, width)).flatten(1, 2)
        return super().forward(x)


class OfGrids(Rotated):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OwnPositions(), OwnPositions()])

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, grid)
        return self.final(x)


def test_module_that_computes_positions_inside_is_named():
    examples = [{**tokens_of(5 * width), "grid": torch.tensor([5, width])} for width in (5, 7)]
    proposal = propose_plan(fill(OfGrids(), seed=1), examples)
    assert proposal.plan is None
    assert "blocks.0 (OwnPositions)" in " ".join(proposal.questions)
    assert "docs/own_model.md" in " ".join(proposal.questions)


class Pooled(Hybrid):
    """A hybrid with softmaxes before the blocks, in the blocks without effect, and over classes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "before":
            x = (x @ x.mT).softmax(-1) @ x
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            if self.kind == "unused":
                (x @ x.mT).softmax(-1)
            elif self.kind == "classes":
                x = x * x.unflatten(2, (4, 6)).softmax(-1).flatten(2)
            elif self.kind == "attention":
                x = x + (x @ x.mT).softmax(-1) @ x
        return self.final(x)


@pytest.mark.parametrize("kind", ["before", "unused", "classes", "attention"])
def test_only_softmaxes_between_split_and_gather_are_named(kind):
    proposal = propose_plan(fill(Pooled(kind), seed=1), (tokens_of(25), tokens_of(37)))
    assert proposal.plan is None
    assert ("softmax" in " ".join(proposal.questions)) == (kind == "attention")


class FramesBlock(nn.Module):
    """Attention over the flattened tokens of ``[B, T, H, W, C]``, modulated by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.modulation = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, time: Tensor, angles: Tensor) -> Tensor:
        sizes = x.shape[1:4]
        x = x * (1 + self.modulation(time)[:, :, None, None])
        q, k, v = heads_of(self.qkv(x).flatten(1, 3), 3)
        out = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v)
        return x + self.out(out.transpose(1, 2).flatten(2).unflatten(1, sizes))


class OfFrames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.final = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList([FramesBlock(), FramesBlock()])

    def forward(self, video: Tensor, time: Tensor) -> Tensor:
        x = self.inp(video.movedim(1, -1))
        angles = Rotary().angles(x.shape[1:4].numel())
        for block in self.blocks:
            x = block(x, time, angles)
        return self.final(x).movedim(-1, 1)


def frames_of(frames: int, height: int = 3, width: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(frames)
    return {
        "video": torch.randn(2, 6, frames, height, width, generator=generator),
        "time": torch.randn(2, frames, 24, generator=generator),
    }


FRAMES = Plan(
    inputs={},
    inner={
        "blocks.0": {"x": Split(1, segment="video", together=(2, 3))},
        "blocks.*": {"time": Split(1, like="video"), "angles": Split(0, like="video")},
    },
    outputs={"final": Gather(1, "video")},
    joint_order=("video",),
)


def test_plan_of_blocks_of_frames():
    model = OfFrames()
    proposal = propose_exact(model, (frames_of(5), frames_of(7)), frames_of(5, 2, 5), segment="video")
    assert proposal.plan == FRAMES
    # There are fewer frames than ranks.
    for frames in (4, 2):
        check = check_parallel(model, plan=proposal.plan, ranks=3, **frames_of(frames))
        assert check.error < 1e-5, check
    # Frames that do not grow are asked for.
    (question,) = propose_plan(fill(OfFrames(), seed=1), (frames_of(5), frames_of(5, 3, 6))).questions
    assert "dim 3" in question


class PackedBlock(RotaryBlock):
    """The structure of Qwen3-VL: attention splits tokens ``[S, C]`` by the cumulative lengths of the images."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        q, k, v = (part[None] for part in self.qkv(x).unflatten(-1, (3, 3, 8)).permute(1, 2, 0, 3).unbind())
        parts = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=2)
        return x + self.out(out[0].transpose(0, 1).flatten(1))


class Tower(nn.Module):
    """A vision tower with a merger of groups of tokens, which also reads the blocks' tokens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.merger = nn.Linear(6, 24), Merger()
        self.blocks = nn.ModuleList([PackedBlock(), PackedBlock()])

    def forward(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        x, cu_seqlens = self.inp(x[0]), F.pad(grid.prod(-1).cumsum(0), (1, 0))
        first = self.blocks[0](x, cu_seqlens)
        merged = self.merger(first)
        return self.blocks[1](first, cu_seqlens), merged


class Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5 * 24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.reshape(-1, 5 * 24))


def images_of(*widths: int) -> dict[str, Tensor]:
    return {**tokens_of(5 * sum(widths)), "grid": torch.tensor([(5, width) for width in widths])}


def test_cumulative_lengths_of_one_sequence_are_those_of_a_rank():
    model = Tower()
    proposal = propose_exact(model, (images_of(5), images_of(9)), images_of(7), ranks=(2, 3))
    assert proposal.plan.inner["blocks.*"] == {"cu_seqlens": CumulativeLengths("image")}
    assert proposal.plan.inner["merger"] == {"x": Gather(-2, "image")}
    several = check_parallel(model, plan=proposal.plan, ranks=2, **images_of(4, 3))
    assert all("ValueError" in case.failure and "cu_seqlens" in case.failure for case in several.cases)
