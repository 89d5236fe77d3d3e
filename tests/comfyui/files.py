"""Make the files of a tiny random Wan and of a LoRA for it: python -m tests.comfyui.files COMFYUI FOLDER."""

import sys
from pathlib import Path

comfyui, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, comfyui)
sys.argv[1:] = ["--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.wan.model  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

# ComfyUI tells Wan from its weights: the dimension is 128 for each head, and a text token has 4096 numbers.
DIM, BLOCKS = 256, 2


def weight(name: str, shape: torch.Size) -> torch.Tensor:
    noise = 0.03 * torch.randn(shape)
    return 1 + noise if "norm" in name and name.endswith("weight") else noise


torch.manual_seed(0)
operations = comfy.ops.disable_weight_init
model = comfy.ldm.wan.model.WanModel(dim=DIM, ffn_dim=512, num_heads=2, num_layers=BLOCKS, operations=operations)
for kind in ("diffusion_models", "loras"):
    (folder / "models" / kind).mkdir(parents=True)
weights = {name: weight(name, x.shape) for name, x in model.state_dict().items()}
save_file(weights, folder / "models" / "diffusion_models" / "wan.safetensors")
lora = {
    f"diffusion_model.blocks.{block}.{layer}.lora_{part}.weight": 0.2 * torch.randn(shape)
    for block in range(BLOCKS)
    for layer in ("self_attn.q", "cross_attn.v")
    for part, shape in (("A", (4, DIM)), ("B", (DIM, 4)))
}
save_file(lora, folder / "models" / "loras" / "lora.safetensors")
