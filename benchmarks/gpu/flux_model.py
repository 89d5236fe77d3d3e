"""FLUX.1's transformer in plain PyTorch, for machines without diffusers.

The modules, parameter names, argument names and results are those of ``diffusers.FluxTransformer2DModel`` 0.42, so
para_core's adapter of FLUX.1 applies to it by the name of the class. It has no LoRA, no ControlNet inputs and no
checkpoint loading.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]


class FluxTransformer2DModel(nn.Module):
    """The transformer of FLUX.1-dev. The defaults are its published sizes (12 billion parameters).

    Args:
        axes_dims_rope: rotary dims of each column of the ids. Their sum is ``attention_head_dim``.
    """

    _repeated_blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

    def __init__(
        self,
        in_channels: int = 64,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        axes_dims_rope: tuple[int, ...] = (16, 56, 56),
    ) -> None:
        super().__init__()
        if sum(axes_dims_rope) != attention_head_dim:
            raise ValueError(
                f"axes_dims_rope is {axes_dims_rope}; expected dims that add up to attention_head_dim, "
                f"{attention_head_dim}."
            )
        dim = num_attention_heads * attention_head_dim
        sizes = (dim, num_attention_heads, attention_head_dim)
        self.axes_dims_rope = axes_dims_rope
        self.time_text_embed = _TimeGuidanceTextEmbedding(dim, pooled_projection_dim)
        self.context_embedder = nn.Linear(joint_attention_dim, dim)
        self.x_embedder = nn.Linear(in_channels, dim)
        self.transformer_blocks = nn.ModuleList(FluxTransformerBlock(*sizes) for _ in range(num_layers))
        self.single_transformer_blocks = nn.ModuleList(
            FluxSingleTransformerBlock(*sizes) for _ in range(num_single_layers)
        )
        self.norm_out = _ScaleShiftNorm(dim)
        self.proj_out = nn.Linear(dim, in_channels)

    def compile_repeated_blocks(self, **options: Any) -> None:
        """Compile each transformer block in place, as the method of diffusers does."""
        for module in self.modules():
            if type(module).__name__ in self._repeated_blocks:
                module.compile(**options)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the prediction ``[B, S_image, in_channels]`` as a tuple of one.

        Args:
            hidden_states: ``[B, S_image, in_channels]``.
            encoder_hidden_states: ``[B, S_text, joint_attention_dim]``.
            img_ids, txt_ids: positions, ``[S, axes]``.
            timestep, guidance: ``[B]``. The timestep is in 0 … 1.
        """
        if return_dict:
            raise ValueError("return_dict=True needs diffusers; expected False.")
        hidden_states = self.x_embedder(hidden_states)
        temb = self.time_text_embed(
            timestep.to(hidden_states.dtype) * 1000, guidance.to(hidden_states.dtype) * 1000, pooled_projections
        )
        encoder_hidden_states = self.context_embedder(encoder_hidden_states)
        rotary = _rotary(torch.cat((txt_ids, img_ids), dim=0), self.axes_dims_rope)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            encoder_hidden_states, hidden_states = block(
                hidden_states=hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                temb=temb,
                image_rotary_emb=rotary,
            )
        return (self.proj_out(self.norm_out(hidden_states, temb)),)


class FluxTransformerBlock(nn.Module):
    """A block with separate weights for image and text, and joint attention."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm1_context = _AdaLayerNormZero(dim, 6), _AdaLayerNormZero(dim, 6)
        self.attn = _Attention(dim, heads, head_dim, joint=True)
        self.ff, self.ff_context = _FeedForward(dim), _FeedForward(dim)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Rotary
    ) -> tuple[Tensor, Tensor]:
        image, *image_modulation = self.norm1(hidden_states, emb=temb)
        text, *text_modulation = self.norm1_context(encoder_hidden_states, emb=temb)
        image, text = self.attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=image_rotary_emb)
        hidden_states = _after_attention(hidden_states, image, *image_modulation, self.ff)
        encoder_hidden_states = _after_attention(encoder_hidden_states, text, *text_modulation, self.ff_context)
        return encoder_hidden_states, hidden_states


class FluxSingleTransformerBlock(nn.Module):
    """A block with the same weights for image and text, whose attention and MLP run in parallel."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm = _AdaLayerNormZero(dim, 3)
        self.proj_mlp, self.proj_out = nn.Linear(dim, 4 * dim), nn.Linear(5 * dim, dim)
        self.attn = _Attention(dim, heads, head_dim, joint=False)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Rotary
    ) -> tuple[Tensor, Tensor]:
        num_text = encoder_hidden_states.shape[1]
        residual = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        x, gate = self.norm(residual, emb=temb)
        mlp = F.gelu(self.proj_mlp(x), approximate="tanh")
        attended = self.attn(hidden_states=x, image_rotary_emb=image_rotary_emb)
        x = residual + gate[:, None] * self.proj_out(torch.cat([attended, mlp], dim=2))
        return x[:, :num_text], x[:, num_text:]


def _after_attention(
    x: Tensor, attended: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, mlp_gate: Tensor, mlp: nn.Module
) -> Tensor:
    """Return ``x`` plus the gated attention, then plus the gated MLP."""
    x = x + gate[:, None] * attended
    normed = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    out: Tensor = x + mlp_gate[:, None] * mlp(normed)
    return out


class _Attention(nn.Module):
    """Attention with RMS norms of queries and keys. With ``joint``, text has its own projections and comes first."""

    def __init__(self, dim: int, heads: int, head_dim: int, *, joint: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        inner = heads * head_dim
        self.norm_q, self.norm_k = nn.RMSNorm(head_dim, eps=1e-6), nn.RMSNorm(head_dim, eps=1e-6)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, inner) for _ in range(3))
        if joint:
            self.norm_added_q, self.norm_added_k = nn.RMSNorm(head_dim, eps=1e-6), nn.RMSNorm(head_dim, eps=1e-6)
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, inner) for _ in range(3))
            self.to_out, self.to_add_out = nn.ModuleList([nn.Linear(inner, dim)]), nn.Linear(inner, dim)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, image_rotary_emb: Rotary | None = None
    ) -> Any:
        query, key, value = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)) for layer in (self.to_q, self.to_k, self.to_v)
        )
        query, key = self.norm_q(query), self.norm_k(key)
        if encoder_hidden_states is not None:
            text_query, text_key, text_value = (
                layer(encoder_hidden_states).unflatten(-1, (-1, self.head_dim))
                for layer in (self.add_q_proj, self.add_k_proj, self.add_v_proj)
            )
            query = torch.cat([self.norm_added_q(text_query), query], dim=1)
            key = torch.cat([self.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        if image_rotary_emb is not None:
            query, key = _rotate(query, image_rotary_emb), _rotate(key, image_rotary_emb)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        out = out.transpose(1, 2).flatten(2, 3)
        if encoder_hidden_states is None:
            return out
        num_text = encoder_hidden_states.shape[1]
        text, image = out[:, :num_text], out[:, num_text:]
        return self.to_out[0](image), self.to_add_out(text)


class _AdaLayerNormZero(nn.Module):
    """A layer norm modulated by the embedding. It returns the result and the remaining ``parts - 2`` modulations."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts, self.linear = parts, nn.Linear(dim, parts * dim)

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, *rest = self.linear(F.silu(emb)).chunk(self.parts, dim=1)
        x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        return x, *rest


class _ScaleShiftNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(emb)).chunk(2, dim=1)
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


class _Gelu(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class _FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        # The identity replaces the dropout of diffusers, so that parameters have the same names.
        self.net = nn.ModuleList([_Gelu(dim, 4 * dim), nn.Identity(), nn.Linear(4 * dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class _TwoLayers(nn.Module):
    def __init__(self, in_features: int, dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(in_features, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.silu(self.linear_1(x)))
        return out


class _TimeGuidanceTextEmbedding(nn.Module):
    """The sum of the embeddings of timestep, guidance scale and pooled text."""

    FREQUENCIES = 256

    def __init__(self, dim: int, pooled_dim: int) -> None:
        super().__init__()
        self.timestep_embedder = _TwoLayers(self.FREQUENCIES, dim)
        self.guidance_embedder = _TwoLayers(self.FREQUENCIES, dim)
        self.text_embedder = _TwoLayers(pooled_dim, dim)

    def forward(self, timestep: Tensor, guidance: Tensor, pooled: Tensor) -> Tensor:
        time = self.timestep_embedder(self._sinusoids(timestep).to(pooled.dtype))
        out: Tensor = (
            time + self.guidance_embedder(self._sinusoids(guidance).to(pooled.dtype)) + self.text_embedder(pooled)
        )
        return out

    def _sinusoids(self, values: Tensor) -> Tensor:
        """Return ``[B, 256]``: cosines, then sines."""
        half = self.FREQUENCIES // 2
        exponents = -math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=values.device)
        angles = values[:, None].float() * exponents.exp()
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _rotary(ids: Tensor, axes: tuple[int, ...]) -> Rotary:
    """Return cosines and sines ``[S, head_dim]`` of the positions ``[S, axes]``, each twice in a row."""
    angles = []
    for axis, dim in enumerate(axes):
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=ids.device) / dim
        angles.append(torch.outer(ids[:, axis].double(), 10000.0**-exponents).repeat_interleave(2, dim=1))
    table = torch.cat(angles, dim=-1)
    return table.cos().float(), table.sin().float()


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pairs of neighbouring elements of ``[B, S, H, D]``."""
    cos, sin = (table[None, :, None, :] for table in rotary)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)
