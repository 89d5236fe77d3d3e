"""A model of the interfaces of ComfyUI's Wan: names of modules and parameters, wrappers, and blocks."""

import torch
from torch import nn

import comfy.ldm.modules.attention as attention
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

DIM, HEADS = 16, 2


def rotate(x, freqs):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * freqs.cos() - b * freqs.sin(), a * freqs.sin() + b * freqs.cos()], dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, operations, dtype):
        super().__init__()
        self.q, self.k, self.v, self.o = (operations.Linear(DIM, DIM, dtype=dtype) for _ in range(4))

    def forward(self, x, freqs, transformer_options=None):
        q, k = rotate(self.q(x), freqs), rotate(self.k(x), freqs)
        return self.o(attention.optimized_attention(q, k, self.v(x), HEADS, transformer_options=transformer_options))


class CrossAttention(SelfAttention):
    def forward(self, x, context, transformer_options=None):
        k, v = self.k(context), self.v(context)
        return self.o(attention.optimized_attention(self.q(x), k, v, HEADS, transformer_options=transformer_options))


class Block(nn.Module):
    def __init__(self, operations, dtype):
        super().__init__()
        self.self_attn, self.cross_attn = SelfAttention(operations, dtype), CrossAttention(operations, dtype)
        self.norm, self.ffn = operations.LayerNorm(DIM, dtype=dtype), operations.Linear(DIM, DIM, dtype=dtype)

    def forward(self, x, e, freqs, context, transformer_options=None):
        x += self.self_attn(self.norm(x) * (1 + e[:, :, 0]), freqs, transformer_options)
        x = x + self.cross_attn(x, context, transformer_options)
        return x + self.ffn(x).tanh() * e[:, :, 1]


class WanModel(nn.Module):
    patch_size = (1, 2, 2)

    def __init__(self, num_layers=3, operations=None, dtype=None, device=None):
        super().__init__()
        self.dtype, create = dtype, {"dtype": dtype, "device": device}
        self.patch_embedding = nn.Conv3d(4, DIM, (1, 2, 2), (1, 2, 2), **create)
        self.text_embedding = operations.Linear(6, DIM, **create)
        self.time_embedding = operations.Linear(1, 2 * DIM, **create)
        self.blocks = nn.ModuleList(Block(operations, dtype) for _ in range(num_layers))
        self.head = operations.Linear(DIM, 16, **create)

    def forward(self, x, timestep, context, clip_fea=None, transformer_options=None, **kwargs):
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options or {})
        call = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return call.execute(x, timestep, context, clip_fea, transformer_options, **kwargs)

    def _forward(self, x, timestep, context, clip_fea=None, transformer_options=None, **kwargs):
        grid = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        scale = (transformer_options or {}).get("rope_options", {}).get("scale_x", 1.0)
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        freqs = 0.05 * scale * torch.arange(x.shape[1])[None, :, None] * torch.ones(DIM // 2)
        e = self.time_embedding(timestep[:, None, None] / 1000).unflatten(2, (2, DIM))
        context = self.text_embedding(context)
        for block in self.blocks:
            x = block(x, e=e, freqs=freqs, context=context, transformer_options=transformer_options)
        x = self.head(x).unflatten(2, (4, 2, 2)).unflatten(1, grid)
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)

    def preprocess_text_embeds(self, context):
        return self.text_embedding(context)
