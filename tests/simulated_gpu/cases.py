"""The calls that have a budget: attention calls, and pipelines with one feature each, by name."""

from __future__ import annotations

from typing import Any

import torch

from para_core.weights.pipefusion_options import PipeFusion
from tests.simulated_gpu.calls import Attention

ULYSSES, RING = {"ring": 1, "ulysses": 2}, {"ring": 2, "ulysses": 1}

# Name: (ranks, call).
ATTENTION: dict[str, tuple[int, Attention]] = {
    **{
        f"{mesh}, {name}": (shape[0] * shape[1], Attention(*shape, **case))
        for mesh, shape in {"Ulysses 2": (1, 2), "ring 2": (2, 1), "ring 2 × Ulysses 2": (2, 2)}.items()
        for name, case in {
            "bfloat16": {},
            "float32": {"dtype": torch.float32},
            "causal": {"mask": "causal"},
            "key padding": {"mask": "keys"},
            "float32 mask": {"mask": "float32"},
            "grouped heads": {"key_heads": 2},
        }.items()
    },
    "Ulysses 2, bool mask": (2, Attention(1, 2, mask="bool")),
    "ring 2, bool mask": (2, Attention(2, 1, mask="bool")),
    "Ulysses 2, 3 heads": (2, Attention(1, 2, heads=3, key_heads=3)),
    "ring 2, head dim 36": (2, Attention(2, 1, dim=36)),
    "Ulysses 2, bool mask, cuDNN": (2, Attention(1, 2, mask="bool", options=(("backend", "cudnn"),))),
    "ring 2, cuDNN": (2, Attention(2, 1, options=(("backend", "cudnn"),))),
    "ring 4": (4, Attention(4, 1)),
    "ring 2, gathered": (2, Attention(2, 1, options=(("rotate_method", "allgather"),))),
    "ring 2, gathered first": (2, Attention(2, 1, options=(("rotate_method", "gathered"),))),
    "ring 2, gathered first, causal": (2, Attention(2, 1, mask="causal", options=(("rotate_method", "gathered"),))),
    "ring 4 in 2-D": (4, Attention(4, 1, options=(("rotate_method", "2d"),))),
    "ring 2, 8 bits": (2, Attention(2, 1, options=(("comm_dtype", torch.int8),))),
    "Ulysses 4, 6 heads, 2 key heads": (4, Attention(1, 4, heads=6, key_heads=2)),
    "Ulysses 2, block-sparse": (2, Attention(1, 2, mode="block-sparse")),
    "ring 2, block-sparse": (2, Attention(2, 1, mode="block-sparse")),
    "Ulysses 2, half of the keys": (2, Attention(1, 2, mode="half of the keys")),
    "Ulysses 2, one token": (2, Attention(1, 2, tokens=1)),
    "ring 2, one token": (2, Attention(2, 1, tokens=1)),
    "ring 2, finite mask": (2, Attention(2, 1, mask="finite")),
    "ring 4 in 2-D, gradients": (4, Attention(4, 1, grad=True, options=(("rotate_method", "2d"),))),
    "ring 2, gradients, grouped heads": (2, Attention(2, 1, grad=True, key_heads=2)),
    "Ulysses 2, gradients": (2, Attention(1, 2, grad=True)),
    "ring 2, gradients": (2, Attention(2, 1, grad=True)),
    "ring 2, gradients, mask": (2, Attention(2, 1, grad=True, mask="float")),
    "Ulysses 2, key padding, Triton": (
        2,
        Attention(1, 2, mask="keys", tokens=37, heads=4, key_heads=4, dim=16, options=(("backend", "triton"),)),
    ),
    "Ulysses 2, assume_equal": (2, Attention(1, 2, options=(("assume_equal", True),))),
}

# Name: (ranks, pipeline, options of ``calls.generate``).
PIPELINES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "Ulysses": (2, "flux", {"mesh": ULYSSES}),
    "ring, bfloat16": (2, "flux", {"mesh": RING, "dtype": torch.bfloat16}),
    "ring × Ulysses": (4, "flux", {"mesh": {"ring": 2, "ulysses": 2}}),
    "CFG": (4, "wan", {"mesh": {"batch": 2, "ring": 1, "ulysses": 2}}),
    "cache, no hits": (2, "flux", {"mesh": ULYSSES, "threshold": 0.0}),
    "cache, hits": (2, "flux", {"mesh": ULYSSES, "threshold": 1e9}),
    "VAE rows": (2, "flux", {"mesh": ULYSSES, "vae": True}),
    "fsdp": (2, "flux", {"mesh": ULYSSES, "weights": "fsdp"}),
    "tensor": (2, "flux", {"mesh": {"ring": 1, "ulysses": 1, "tensor": 2}, "weights": "tensor"}),
    "stages": (2, "flux", {"mesh": {"pipe": 2, "ring": 1, "ulysses": 1}}),
    # With fewer steps no step is computed by patches.
    "PipeFusion, 8 steps": (
        2,
        "flux",
        {"mesh": {"pipe": 2, "ring": 1, "ulysses": 1}, "pipefusion": PipeFusion(num_patches=2), "steps": 8},
    ),
    "offload of blocks": (2, "flux", {"mesh": ULYSSES, "offload": "blocks"}),
    "offload of text encoders": (2, "flux", {"mesh": ULYSSES, "text_encoders": "offload"}),
    "offload of the VAE": (2, "flux", {"mesh": ULYSSES, "vae_placement": "offload"}),
    "8-bit exchange": (2, "flux", {"mesh": RING, "comm_dtype": torch.int8}),
    "quantized": (2, "flux", {"mesh": ULYSSES, "quantize": True}),
}
