"""Tiny stand-ins for official repositories: FLUX, Wan 2.1, HunyuanVideo, Mochi, Stable Diffusion 3.5, DiT."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modes.fake_flash_attn import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

HEADS, HEAD_DIM = 6, 8
WIDTH = HEADS * HEAD_DIM


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention of ``[B, S, H, D]`` tensors as ``[B, S, H * D]``."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.transpose(1, 2).flatten(2)


def heads(x: Tensor, parts: int = 3) -> tuple[Tensor, ...]:
    """Split ``[B, S, parts * H * D]`` into ``parts`` tensors ``[B, S, H, D]``."""
    return x.unflatten(-1, (parts, HEADS, HEAD_DIM)).unbind(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of ``[B, S, H, D]``; ``cos`` and ``sin`` broadcast to ``[B, S, H, D / 2]``."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def angles(positions: Tensor, dim: int) -> Tensor:
    """Return ``[..., dim]`` angles of integer positions."""
    return positions[..., None].float() / 100 ** (torch.arange(dim) / dim)


def grid(*sizes: int) -> Tensor:
    """Return the indices of a grid, ``[prod(sizes), len(sizes)]``, with the last axis fastest."""
    return torch.cartesian_prod(*[torch.arange(size) for size in sizes]).view(-1, len(sizes))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH))


class LastLayer(nn.Module):
    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.adaLN_modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear = nn.Linear(WIDTH, out_channels)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        return self.linear(modulate(self.norm_final(x), *self.adaLN_modulation(F.silu(vec)).chunk(2, dim=-1)))


# -- FLUX.1: positions of text and image are arguments, and every block receives the table of all angles.


class DoubleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_mod, self.txt_mod = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.img_norm, self.txt_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.img_qkv, self.txt_qkv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.img_mlp, self.txt_mlp = Mlp(), Mlp()

    def attend(self, *qkv: Tensor) -> Tensor:
        return sdpa(*qkv)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        img_shift, img_scale, img_gate = self.img_mod(vec).chunk(3, dim=-1)
        txt_shift, txt_scale, txt_gate = self.txt_mod(vec).chunk(3, dim=-1)
        img_heads = heads(self.img_qkv(modulate(self.img_norm(img), img_shift, img_scale)))
        txt_heads = heads(self.txt_qkv(modulate(self.txt_norm(txt), txt_shift, txt_scale)))
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(txt_heads, img_heads, strict=True))
        cos, sin = pe.cos().transpose(1, 2), pe.sin().transpose(1, 2)
        attn = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        txt_attn, img_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1] :]
        img = img + img_gate[:, None] * self.img_mlp(img + img_attn)
        txt = txt + txt_gate[:, None] * self.txt_mlp(txt + txt_attn)
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec).chunk(3, dim=-1)
        qkv, hidden = self.linear1(modulate(self.pre_norm(x), shift, scale)).split([3 * WIDTH, 2 * WIDTH], dim=-1)
        q, k, v = heads(qkv)
        cos, sin = pe.cos().transpose(1, 2), pe.sin().transpose(1, 2)
        attn = sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return x + gate[:, None] * self.linear2(torch.cat([attn, F.gelu(hidden)], dim=-1))


class EmbedND(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        """Return angles ``[B, 1, S, 4]`` of positions ``[B, S, 3]``: one per coordinate, and a second of the last."""
        return torch.cat([ids, ids[..., -1:] / 10], dim=-1)[:, None]


class Flux(nn.Module):
    """The structure of ``flux.model.Flux``."""

    def __init__(self) -> None:
        super().__init__()
        self.pe_embedder = EmbedND()
        self.img_in, self.txt_in, self.vector_in = nn.Linear(16, WIDTH), nn.Linear(20, WIDTH), nn.Linear(12, WIDTH)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock() for _ in range(2))
        self.final_layer = LastLayer(16)

    def forward(
        self, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor, y: Tensor
    ) -> Tensor:
        img, txt = self.img_in(img), self.txt_in(txt)
        vec = self.vector_in(y) + timesteps[:, None]
        pe = self.pe_embedder(torch.cat([txt_ids, img_ids], dim=1))
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat([txt, img], dim=1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        img = img[:, txt.shape[1] :]
        return self.final_layer(img, vec)


# -- Wan 2.1: each attention computes its rotary positions from the size of the whole video.


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
    """Rotate ``[B, S, H, D]`` by the positions of a ``(frames, height, width)`` grid."""
    frames, height, width = grid_sizes[0].tolist()
    index = grid(frames, height, width)
    parts = freqs.split([HEAD_DIM // 2 - 2, 1, 1], dim=1)
    table = torch.cat([part[index[:, axis]] for axis, part in enumerate(parts)], dim=-1)[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, k_lens: Tensor | None = None) -> Tensor:
    """Attend over ``[B, S, H, D]`` with all samples in one sequence, and the keys of each sample up to its length."""
    batch, num_queries, num_keys = len(q), q.shape[1], k.shape[1]
    lengths = [num_keys] * batch if k_lens is None else k_lens.tolist()
    k, v = (torch.cat([sample[:length] for sample, length in zip(x, lengths, strict=True)]) for x in (k, v))
    ends_q = torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32)
    ends_k = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    out = flash_attn_varlen_func(q.flatten(0, 1), k, v, ends_q, ends_k, num_queries, num_keys)
    return out.unflatten(0, (batch, num_queries))


class WanSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (HEADS, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        q, k = rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)
        return self.o(flash_attention(q, k, v, k_lens=seq_lens).flatten(2))


class WanCrossAttention(WanSelfAttention):
    def forward(self, x: Tensor, context: Tensor, context_lens: Tensor | None) -> Tensor:
        q, k, v = (y.unflatten(2, (HEADS, HEAD_DIM)) for y in (self.q(x), self.k(context), self.v(context)))
        return self.o(flash_attention(q, k, v, k_lens=context_lens).flatten(2))


class WanAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.self_attn, self.cross_attn, self.ffn = WanSelfAttention(), WanCrossAttention(), Mlp()
        self.modulation = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor,
        grid_sizes: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        e1, e2, e3, e4, e5, e6 = (self.modulation + e).unbind(dim=1)
        x = x + e3[:, None] * self.self_attn(modulate(self.norm1(x), e1, e2), seq_lens, grid_sizes, freqs)
        x = x + self.cross_attn(self.norm3(x), context, context_lens)
        return x + e6[:, None] * self.ffn(modulate(self.norm2(x), e4, e5))


class Head(nn.Module):
    def __init__(self, out_dim: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, out_dim)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.head(self.norm(x) * (1 + e[:, None]))


class WanModel(nn.Module):
    """The structure of ``wan.modules.model.WanModel`` (text to video)."""

    text_len = 12

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, WIDTH, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Sequential(nn.Linear(20, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.time_embedding, self.time_projection = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks = nn.ModuleList(WanAttentionBlock() for _ in range(2))
        self.head = Head(16)
        # As in the official code, this is no buffer, because a change of dtype must not reach it.
        self.freqs = torch.polar(torch.ones(64, HEAD_DIM // 2), angles(torch.arange(64), HEAD_DIM // 2)).cdouble()

    def forward(self, x: list[Tensor], t: Tensor, context: list[Tensor], seq_len: int) -> list[Tensor]:
        patches = [self.patch_embedding(u[None]) for u in x]
        grid_sizes = torch.tensor([list(u.shape[2:]) for u in patches])
        tokens = [u.flatten(2).transpose(1, 2) for u in patches]
        seq_lens = torch.tensor([u.shape[1] for u in tokens])
        h = torch.cat([F.pad(u, (0, 0, 0, seq_len - u.shape[1])) for u in tokens])
        e = self.time_embedding(t[:, None])
        text = self.text_embedding(torch.stack([F.pad(u, (0, 0, 0, self.text_len - len(u))) for u in context]))
        e0 = self.time_projection(e).unflatten(1, (6, WIDTH))
        kwargs = {"seq_lens": seq_lens, "grid_sizes": grid_sizes, "freqs": self.freqs}
        for block in self.blocks:
            h = block(h, e=e0, **kwargs, context=text, context_lens=None)
        h = self.head(h, e)
        return [u[: math.prod(size)] for u, size in zip(h, grid_sizes.tolist(), strict=True)]


# -- HunyuanVideo: the text refiner attends by SDPA, then blocks attend by flash_attn, with lengths of the model.


def attention(q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | int) -> Tensor:
    """Attend over ``[B, S, H, D]`` with the lengths of flash_attn, and return ``[B, S, H * D]``."""
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths)
    return out.view(q.shape).flatten(2)


class TokenRefinerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.self_attn_qkv, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), Mlp()

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        q, k, v = heads(self.self_attn_qkv(self.norm1(x)))
        return self.mlp(x + sdpa(q, k, v, attn_mask))


class SingleTokenRefiner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_embedder = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList([TokenRefinerBlock()])

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        valid = mask[:, None, None, :] & mask[:, None, :, None]
        valid[..., 0] = True
        x = self.input_embedder(x) + t[:, None, None]
        for block in self.blocks:
            x = block(x, valid)
        return x


class MMDoubleStreamBlock(DoubleStreamBlock):
    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        freqs_cis: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        img_shift, img_scale, img_gate = self.img_mod(vec).chunk(3, dim=-1)
        txt_shift, txt_scale, txt_gate = self.txt_mod(vec).chunk(3, dim=-1)
        img_q, img_k, img_v = heads(self.img_qkv(modulate(self.img_norm(img), img_shift, img_scale)))
        txt_q, txt_k, txt_v = heads(self.txt_qkv(modulate(self.txt_norm(txt), txt_shift, txt_scale)))
        cos, sin = (x[None, :, None] for x in freqs_cis)
        q = torch.cat([rotate(img_q, cos, sin), txt_q], dim=1)
        k = torch.cat([rotate(img_k, cos, sin), txt_k], dim=1)
        v = torch.cat([img_v, txt_v], dim=1)
        attn = attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        img_attn, txt_attn = attn[:, : img.shape[1]], attn[:, img.shape[1] :]
        img = img + img_gate[:, None] * self.img_mlp(img + img_attn)
        txt = txt + txt_gate[:, None] * self.txt_mlp(txt + txt_attn)
        return img, txt


class MMSingleStreamBlock(SingleStreamBlock):
    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        txt_len: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        freqs_cis: tuple[Tensor, Tensor],
    ) -> Tensor:
        shift, scale, gate = self.modulation(vec).chunk(3, dim=-1)
        qkv, hidden = self.linear1(modulate(self.pre_norm(x), shift, scale)).split([3 * WIDTH, 2 * WIDTH], dim=-1)
        q, k, v = heads(qkv)
        cos, sin = (y[None, :, None] for y in freqs_cis)
        q = torch.cat([rotate(q[:, :-txt_len], cos, sin), q[:, -txt_len:]], dim=1)
        k = torch.cat([rotate(k[:, :-txt_len], cos, sin), k[:, -txt_len:]], dim=1)
        attn = attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        return x + gate[:, None] * self.linear2(torch.cat([attn, F.gelu(hidden)], dim=-1))


class HYVideoDiffusionTransformer(nn.Module):
    """The structure of ``hyvideo.modules.models.HYVideoDiffusionTransformer``."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in = nn.Conv3d(4, WIDTH, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.txt_in, self.vector_in = SingleTokenRefiner(), nn.Linear(12, WIDTH)
        self.double_blocks = nn.ModuleList(MMDoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(MMSingleStreamBlock() for _ in range(2))
        self.final_layer = LastLayer(16)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        text_states: Tensor,
        text_mask: Tensor,
        text_states_2: Tensor,
        freqs_cos: Tensor,
        freqs_sin: Tensor,
    ) -> Tensor:
        vec = self.vector_in(text_states_2) + t[:, None]
        img = self.img_in(x).flatten(2).transpose(1, 2)
        txt = self.txt_in(text_states, t, text_mask)
        img_len, txt_len = img.shape[1], txt.shape[1]
        # Each sample has its valid tokens first, and then its padding.
        length = img_len + txt_len
        ends = [(i * length + img_len + int(n), (i + 1) * length) for i, n in enumerate(text_mask.sum(1))]
        cu_seqlens = torch.tensor([0, *[end for pair in ends for end in pair]], dtype=torch.int32)
        lengths = (cu_seqlens, cu_seqlens, length, length)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, *lengths, (freqs_cos, freqs_sin))
        h = torch.cat([img, txt], dim=1)
        for block in self.single_blocks:
            h = block(h, vec, txt_len, *lengths, (freqs_cos, freqs_sin))
        return self.final_layer(h[:, :img_len], vec)


# -- Mochi: the model pools text by SDPA before the blocks, which pack the valid tokens of both streams for flash_attn.


class AttentionPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_kv, self.to_q, self.to_out = nn.Linear(20, 2 * WIDTH), nn.Linear(20, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None] / mask.sum(1)[:, None, None]
        pooled = (weights * x).sum(dim=1, keepdim=True)
        k, v = heads(self.to_kv(torch.cat([pooled, x], dim=1)), 2)
        (q,) = heads(self.to_q(pooled), 1)
        return self.to_out(sdpa(q, k, v, F.pad(mask, (1, 0), value=True)[:, None, None]))[:, 0]


class AsymmetricAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_x, self.qkv_y = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj_x, self.proj_y = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, *, packed_indices: dict[str, Any], **rope: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = heads(self.qkv_x(x))
        q, k = (rotate(z, rope["rope_cos"], rope["rope_sin"]) for z in (q, k))
        joint = [torch.cat(pair, dim=1) for pair in zip((q, k, v), heads(self.qkv_y(y)), strict=True)]
        valid = packed_indices["valid_token_indices_kv"]
        packed = torch.stack(joint, dim=2).flatten(0, 1)[valid]
        lengths = (packed_indices["cu_seqlens_kv"], packed_indices["max_seqlen_in_batch_kv"])
        out = flash_attn_varlen_qkvpacked_func(packed, *lengths)
        attn = out.new_zeros(len(joint[0]) * joint[0].shape[1], WIDTH)
        attn[valid] = out.flatten(1)
        attn = attn.unflatten(0, (len(x), -1))
        return self.proj_x(attn[:, : x.shape[1]]), self.proj_y(attn[:, x.shape[1] :])


class AsymmetricJointBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mod_x, self.mod_y = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm_x, self.norm_y = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn, self.mlp_x, self.mlp_y = AsymmetricAttention(), Mlp(), Mlp()

    def forward(self, x: Tensor, c: Tensor, y: Tensor, **attn_kwargs: Any) -> tuple[Tensor, Tensor]:
        shift_x, scale_x = self.mod_x(F.silu(c)).chunk(2, dim=-1)
        shift_y, scale_y = self.mod_y(F.silu(c)).chunk(2, dim=-1)
        attn_x, attn_y = self.attn(
            modulate(self.norm_x(x), shift_x, scale_x), modulate(self.norm_y(y), shift_y, scale_y), **attn_kwargs
        )
        x, y = x + attn_x, y + attn_y
        return x + self.mlp_x(x), y + self.mlp_y(y)


def compute_packed_indices(text_mask: Tensor, num_latents: int) -> dict[str, Any]:
    """Return the indices of the valid tokens of ``[B, num_latents + text]``, and the start of each sample there."""
    mask = F.pad(text_mask, (num_latents, 0), value=True)
    lengths = mask.sum(1)
    return {
        "valid_token_indices_kv": mask.flatten().nonzero()[:, 0],
        "cu_seqlens_kv": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen_in_batch_kv": int(lengths.max()),
    }


class AsymmDiTJoint(nn.Module):
    """The structure of ``genmo.mochi_preview.dit.joint_model.asymm_models_joint.AsymmDiTJoint``."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, WIDTH, kernel_size=2, stride=2)
        self.t5_y_embedder, self.t5_yproj = AttentionPool(), nn.Linear(20, WIDTH)
        self.pos_frequencies = nn.Parameter(torch.randn(3, HEADS, HEAD_DIM // 2))
        self.blocks = nn.ModuleList(AsymmetricJointBlock() for _ in range(2))
        self.final_layer = LastLayer(16)

    def forward(
        self, x: Tensor, sigma: Tensor, y_feat: list[Tensor], y_mask: list[Tensor], packed_indices: dict[str, Any]
    ) -> Tensor:
        frames, height, width = x.shape[-3:]
        x = self.x_embedder(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, frames)).flatten(3)
        x = x.transpose(2, 3).flatten(1, 2)
        rope = torch.einsum("na,ahd->nhd", grid(frames, height // 2, width // 2).float(), self.pos_frequencies)
        c = self.t5_y_embedder(y_feat[0], y_mask[0]) + sigma[:, None]
        y = self.t5_yproj(y_feat[0])
        for block in self.blocks:
            x, y = block(x, c, y, rope_cos=rope.cos(), rope_sin=rope.sin(), packed_indices=packed_indices)
        return self.final_layer(x, c)


# -- Stable Diffusion 3.5: the model adds positions before the blocks, and a block's forward takes (*args, **kwargs).


class DismantledBlock(nn.Module):
    def __init__(self, pre_only: bool = False, x_block_self_attn: bool = False) -> None:
        super().__init__()
        self.pre_only, self.x_block_self_attn = pre_only, x_block_self_attn
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv2, self.proj2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adaLN_modulation, self.mlp = nn.Linear(WIDTH, 2 * WIDTH), Mlp()

    def pre_attention(self, x: Tensor, c: Tensor) -> Tensor:
        return modulate(self.norm1(x), *self.adaLN_modulation(F.silu(c)).chunk(2, dim=-1))

    def post_attention(self, attn: Tensor, x: Tensor, attn2: Tensor | None = None) -> Tensor:
        x = x + self.proj(attn)
        if attn2 is not None:
            x = x + self.proj2(attn2)
        return x + self.mlp(x)


def block_mixing(
    context: Tensor, x: Tensor, context_block: DismantledBlock, x_block: DismantledBlock, c: Tensor
) -> tuple[Tensor | None, Tensor]:
    context_heads = heads(context_block.qkv(context_block.pre_attention(context, c)))
    x_in = x_block.pre_attention(x, c)
    attn = sdpa(*(torch.cat(pair, dim=1) for pair in zip(context_heads, heads(x_block.qkv(x_in)), strict=True)))
    # In Stable Diffusion 3.5 Medium, image tokens attend to each other a second time.
    attn2 = sdpa(*heads(x_block.qkv2(x_in))) if x_block.x_block_self_attn else None
    length = context.shape[1]
    out = None if context_block.pre_only else context_block.post_attention(attn[:, :length], context)
    return out, x_block.post_attention(attn[:, length:], x, attn2)


class JointBlock(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.context_block = DismantledBlock(pre_only=kwargs.pop("pre_only"))
        self.x_block = DismantledBlock(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor]:
        return block_mixing(*args, context_block=self.context_block, x_block=self.x_block, **kwargs)


class MMDiTX(nn.Module):
    """The structure of ``mmditx.MMDiTX`` of Stability-AI/sd3.5."""

    pos_embed_max_size = 12

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, WIDTH, kernel_size=2, stride=2)
        self.context_embedder, self.y_embedder = nn.Linear(20, WIDTH), nn.Linear(12, WIDTH)
        self.register_buffer(
            "pos_embed", torch.randn(1, self.pos_embed_max_size**2, WIDTH, generator=torch.Generator().manual_seed(3))
        )
        self.joint_blocks = nn.ModuleList(JointBlock(pre_only=i == 2, x_block_self_attn=i < 2) for i in range(3))
        self.final_layer = LastLayer(16)

    def cropped_pos_embed(self, height: int, width: int) -> Tensor:
        size = self.pos_embed_max_size
        top, left = (size - height) // 2, (size - width) // 2
        table = self.pos_embed.unflatten(1, (size, size))[:, top : top + height, left : left + width]
        return table.flatten(1, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, context: Tensor) -> Tensor:
        patches = self.x_embedder(x)
        x = patches.flatten(2).transpose(1, 2) + self.cropped_pos_embed(*patches.shape[2:])
        c = self.y_embedder(y) + t[:, None]
        context = self.context_embedder(context)
        for block in self.joint_blocks:
            context, x = block(context, x, c=c)
        return self.final_layer(x, c)


# -- DiT: a learned table of positions fixes the size of the image.


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()
        self.adaLN_modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, shift2, scale2 = self.adaLN_modulation(F.silu(c)).chunk(4, dim=-1)
        x = x + self.proj(sdpa(*heads(self.qkv(modulate(self.norm1(x), shift1, scale1)))))
        return x + self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """The structure of ``models.DiT`` of facebookresearch/DiT."""

    def __init__(self, input_size: int = 14) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, WIDTH, kernel_size=2, stride=2)
        self.y_embedder = nn.Embedding(10, WIDTH)
        self.pos_embed = nn.Parameter(torch.zeros(1, (input_size // 2) ** 2, WIDTH))
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.final_layer = LastLayer(16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.y_embedder(y) + t[:, None]
        for block in self.blocks:
            x = block(x, c)
        return self.final_layer(x, c)
