"""Models whose blocks are arranged, and take tokens, in many ways, with their own names for modules and arguments."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from para_core.plans.plan import Split
from zoo.tiny.base import noise


def module(name, forward, **parts):
    """Return an instance of a new class with this name, this method, and these parts. A list becomes a module list."""
    made = type(name, (nn.Module,), {"forward": forward})()
    for key, part in parts.items():
        setattr(made, key, nn.ModuleList(part) if isinstance(part, list) else part)
    return made


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of two heads over ``[B, S, 2 × 8]`` inputs."""
    q, k, v = (x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def turned(x, angles):
    """Rotate ``x`` ``[..., S, 2 × D]`` by ``angles`` ``[S, D]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


# -- Two streams, joined with text first.


def layer(of_words=False):
    """Return a layer of image and text. ``of_words`` scales the text by weights ``[B, text]`` and has no positions."""

    def forward(self, latents, caption, positions):
        q, k, v = self.qkv(torch.cat([caption, latents], dim=1)).chunk(3, dim=2)
        out = attend(turned(q, positions), turned(k, positions), v)
        text, image = out[:, : caption.shape[1]], out[:, caption.shape[1] :]
        return caption + self.mlp(text), latents + self.mlp(image)

    def forward_words(self, latents, caption, words):
        positions = torch.zeros(caption.shape[1] + latents.shape[1], 8)
        return forward(self, latents, caption * words[:, :, None], positions)

    parts = {"qkv": nn.Linear(16, 48), "mlp": nn.Linear(16, 16)}
    return module("Layer", forward_words if of_words else forward, **parts)


def paint(self, latents, caption, positions, residuals=None, left_out=None):
    """Add a ControlNet's residuals between the layers, and leave one out."""
    latents = self.embed(latents)
    for index, layer in enumerate(self.layers):
        if index != left_out:
            caption, latents = layer(latents, caption, positions)
        if residuals is not None:
            latents = latents + residuals[index]
    return self.out(latents)


def painter(forward=paint, name="Painter", of_words=False):
    layers = [layer(of_words) for _ in range(3)]
    return module(name, forward, embed=nn.Linear(4, 16), layers=layers, out=nn.Linear(16, 4))


def painter_of_words():
    """Return a model that has a weight for each word and no positions."""

    def forward(self, latents, caption, words):
        return paint(self, latents, caption, words)

    return painter(forward, "Weighted", True)


def painter_inputs(tokens, *, controlled=False, **more):
    inputs = {"latents": noise(2, tokens, 4), "caption": noise(2, 5, 16), "positions": noise(5 + tokens, 8)}
    if controlled:
        more["residuals"] = [noise(2, tokens, 16) * scale for scale in (1, 2, 3)]
    return {**inputs, **more}


def inputs_of_words(tokens):
    inputs = painter_inputs(tokens)
    return {"latents": inputs["latents"], "caption": inputs["caption"], "words": inputs["caption"][:, :, 0]}


# -- Blocks of tokens [B, S, 24] with three heads.


def heads_of(x, parts):
    """Return ``parts`` tensors ``[B, 3, S, 8]`` of three heads, from ``[B, S, parts * 24]``."""
    return x.unflatten(-1, (parts, 3, 8)).permute(2, 0, 3, 1, 4).unbind()


def mix(self, x, turn=lambda t: t, attention=F.scaled_dot_product_attention, **options):
    """Add self-attention to ``x``, with queries and keys that ``turn`` changes."""
    q, k, v = heads_of(self.qkv(x), 3)
    return x + self.out(attention(turn(q), turn(k), v, **options).transpose(1, 2).flatten(2))


def block(forward=mix, **parts):
    return module("Block", forward, qkv=nn.Linear(24, 72), out=nn.Linear(24, 24), **parts)


def run_blocks(self, x, *args):
    for each in self.blocks:
        x = each(x, *args)
    return x


def model(blocks, forward=lambda self, x: self.final(run_blocks(self, self.inp(x))), name="Model", **parts):
    return module(name, forward, inp=nn.Linear(6, 24), final=nn.Linear(24, 6), blocks=blocks, **parts)


def tokens_of(length):
    return {"x": noise(1, length, 6)}


def lists(make=block):
    """Return a list of lists with residuals added outside, as in vit-pytorch."""

    def add(self, x):
        for first, second in self.layers:
            x = second(first(x) + x)
        return x

    modules = [make(), nn.Linear(24, 24), make(), nn.Linear(24, 24)]
    layers = [nn.ModuleList(modules[:2]), nn.ModuleList(modules[2:])]
    return module(
        "Lists",
        lambda self, x: self.head(self.transformer(self.patches(x).flatten(2).transpose(1, 2)).mean(dim=1)),
        patches=nn.Conv2d(3, 24, 4, 4),
        transformer=module("Transformer", add, layers=layers),
        head=nn.Linear(24, 5),
    )


def by_hand(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def lists_by_hand():
    return lists(lambda: block(lambda self, x: mix(self, x, attention=by_hand)))


def padded():
    """Return a model whose attention pads all tokens to a multiple of 4, and masks the padding."""

    def forward(self, x):
        q, k, v = (y(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        tokens = q.shape[2]
        q, k, v = (F.pad(y, (0, 0, 0, -tokens % 4)) for y in (q, k, v))
        valid = torch.arange(q.shape[2]) < tokens
        out = F.scaled_dot_product_attention(q, k, v, valid[None, None, None])[:, :, :tokens]
        return self.out(out.transpose(1, 2).flatten(2))

    parts = [{key: nn.Linear(24, 24) for key in ("q", "k", "v", "out")} for _ in range(2)]
    return model([module("Padded", forward, heads=4, **of_block) for of_block in parts])


def image(height, width):
    return {"x": noise(2, 3, height, width)}


def encoder():
    """Return a model of torch's own encoder, in one module."""
    of_torch = nn.TransformerEncoderLayer(24, 2, 32, batch_first=True)
    parts = {"embed": nn.Linear(6, 24), "encoder": nn.TransformerEncoder(of_torch, 2, enable_nested_tensor=False)}
    return module("Encoder", lambda self, x: self.encoder(self.embed(x)), **parts)


def causal_mask(text, video):
    """Return the mask for ``text`` tokens, which all see, and frames of five tokens, which see earlier ones."""
    frame = torch.cat([torch.full((text,), -1), torch.arange(video) // 5])
    total = text + video
    return create_block_mask(lambda b, h, q, k: frame[q] >= frame[k], None, None, total, total, device="cpu")


def causal_video():
    """Return blocks of flex attention over text and video."""

    def forward(self, video, text, mask):
        return self.final(run_blocks(self, torch.cat([text, self.inp(video)], dim=1), mask)[:, text.shape[1] :])

    def of_mask(self, x, mask):
        return mix(self, x, attention=flex_attention, block_mask=mask)

    return model([block(of_mask), block(of_mask)], forward)


def causal_inputs(tokens, text):
    return {"video": noise(1, tokens, 6), "text": noise(1, text, 24), "mask": causal_mask(text, tokens)}


@dataclass(frozen=True)
class Stream:
    """The arguments of a block for tokens of one kind."""

    x: Tensor
    time: Tensor
    text: Tensor
    enabled: bool = True


def cross(q, kv):
    (q,), (k, v) = heads_of(q, 1), heads_of(kv, 2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def streams():
    """Return a model that passes its blocks a dataclass and returns it."""

    def of_stream(self, stream):
        x = mix(self, stream.x * (1 + stream.time))
        return replace(stream, x=x + cross(self.q(x), self.kv(stream.text)))

    parts = {"q": (24, 24), "kv": (24, 48)}
    blocks = [block(of_stream, **{key: nn.Linear(*sizes) for key, sizes in parts.items()}) for _ in range(2)]
    return model(blocks, lambda self, x, time, text: run_blocks(self, Stream(self.inp(x), time, text)))


def stream_inputs(tokens):
    return {"x": noise(1, tokens, 6), "time": noise(1, tokens, 1), "text": noise(1, 8, 24)}


def angles_of(tokens):
    return torch.linspace(0.1, 5.0, tokens)[:, None] * torch.tensor([1.0, 0.4, 0.2, 0.1])


def rotated():
    """Return the structure of RAE: a rotary embedding inside attention makes a table of all tokens."""

    def rotary():
        return module("Rotary", lambda self, x: turned(x, angles_of(x.shape[-2])))

    return model([block(lambda self, x: mix(self, x, self.turn), turn=rotary()) for _ in range(2)])


def with_others():
    """Return the structure of DINOv3: the table has rows for patches. Other tokens come before them."""

    def with_angles(self, x, angles):
        patches = angles[0].shape[0]

        def turn(t):
            others, image = t.split([x.shape[1] - patches, patches], dim=2)
            return torch.cat([others, turned(turned(image, angles[0]), angles[1])], dim=2)

        return mix(self, x, turn)

    def forward(self, x):
        angles = angles_of(x.shape[1])
        x = torch.cat([self.others.expand(len(x), -1, -1), self.inp(x)], dim=1)
        return self.final(run_blocks(self, x, (angles, 2 * angles)))

    return model([block(with_angles), block(with_angles)], forward, others=nn.Parameter(torch.randn(1, 3, 24)))


def hybrid(kind):
    """Return layers that mix tokens without attention, around one of it with unused flags. ``kind`` adds it by hand."""

    def accumulate(self, x):
        return self.out(self.inp(x).cumsum(dim=1))

    def mixing():
        mixer = module("Mixer", accumulate, inp=nn.Linear(24, 24), out=nn.Linear(24, 24))
        return module(
            "HybridLayer", lambda self, x, is_long: x + self.mlp(x + self.mixer(x)), mixer=mixer, mlp=nn.Linear(24, 24)
        )

    def forward(self, x):
        x = self.inp(x)
        for each in self.blocks:
            x = each(x, x.shape[1] > 30)
            if kind == "attention":
                x = x + (x @ x.mT).softmax(-1) @ x
        return self.final(x)

    return model([mixing(), block(lambda self, x, is_long: mix(self, x)), mixing()], forward, "Hybrid")


def OfFrames():
    """Return a model whose attention flattens tokens ``[B, T, H, W, C]``, which are modulated by frame."""

    def of_frames(self, x, time, angles):
        x = x * (1 + self.modulation(time)[:, :, None, None])
        return mix(self, x.flatten(1, 3), lambda t: turned(t, angles)).unflatten(1, x.shape[1:4])

    def forward(self, video, time):
        x = video.movedim(1, -1)
        x = run_blocks(self, self.inp(x), time, angles_of(x.shape[1:4].numel()))
        return self.final(x).movedim(-1, 1)

    return model([block(of_frames, modulation=nn.Linear(24, 24)) for _ in range(2)], forward)


def frames_of(frames, height=3, width=4):
    return {"video": noise(2, 6, frames, height, width), "time": noise(2, frames, 24)}


# The rules of its blocks.
OF_FRAMES = {
    "blocks.0": {"x": Split(1, segment="video", together=(2, 3))},
    "blocks.*": {"time": Split(1, like="video"), "angles": Split(0, like="video")},
}


def tower():
    """Return the structure of Qwen3-VL: attention by cumulative lengths, and a merger of groups of tokens."""

    def packed(self, x, cu_seqlens):
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = zip(*(t.split(lengths, dim=2) for t in heads_of(self.qkv(x)[None], 3)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=2)
        return x + self.out(out[0].transpose(0, 1).flatten(1))

    def forward(self, x, grid):
        x, cu_seqlens = self.inp(x[0]), F.pad(grid.prod(-1).cumsum(0), (1, 0))
        first = self.blocks[0](x, cu_seqlens)
        merged = self.merger(first)
        return self.blocks[1](first, cu_seqlens), merged

    merger = module("Merger", lambda self, x: self.project(x.reshape(-1, 5 * 24)), project=nn.Linear(5 * 24, 6))
    return model([block(packed), block(packed)], forward, merger=merger)


def images_of(*widths):
    return {**tokens_of(5 * sum(widths)), "grid": torch.tensor([(5, width) for width in widths])}
