"""Sample a tiny FLUX by ComfyUI's loader and sampler, alone and on ranks, and print the differences as JSON.

python -m tests.comfyui.flux COMFYUI FOLDER RANKS
"""

import json
import sys
from pathlib import Path

from benchmarks.comfyui.cases import noise, randomize
from benchmarks.comfyui.classes import import_comfyui

comfyui, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
import_comfyui(comfyui)

import comfy.controlnet  # noqa: E402
import comfy.ldm.flux.model  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from comfyui_para_core.remote_patcher import load_remote  # noqa: E402
from comfyui_para_core.settings import Settings  # noqa: E402

# ComfyUI tells FLUX from its weights: the dimension is 128 for each head.
CONFIG = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 20,
    "context_in_dim": 24,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}


class Residuals(comfy.controlnet.ControlBase):
    """A ControlNet of ComfyUI that gives random residuals, for some blocks only."""

    def get_control(self, x, timestep, conditions, batch, options):
        tokens = ((x.shape[-2] + 1) // 2) * ((x.shape[-1] + 1) // 2)
        residual = 0.5 * noise(1, tokens, 256, seed=3).expand(x.shape[0], -1, -1)
        return {"input": [residual, None], "middle": [], "output": [None, -residual, residual]}

    def pre_run(self, model, percent_to_timestep_function):
        pass

    def get_models(self):
        return []


def sample(model, control=False, **conditions):
    positive = {"pooled_output": noise(1, 20, seed=5), "guidance": 3.5, **conditions}
    if control:
        positive |= {"control": Residuals(), "control_apply_to_uncond": True}
    text, latent = noise(1, 7, 24, seed=4), torch.zeros(1, 16, 11, 14)
    arguments = ([[text, positive]], [[torch.zeros_like(text), dict(positive)]], latent)
    start = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, start, 4, 3.5, "euler", "simple", *arguments, seed=1, disable_pbar=True)


def difference(out, expected):
    return float((out - expected).norm() / expected.norm())


torch.manual_seed(0)
path = folder / "flux.safetensors"
model = comfy.ldm.flux.model.Flux(**CONFIG, operations=comfy.ops.disable_weight_init)
save_file(randomize(model).state_dict(), path)
local = comfy.sd.load_diffusion_model(str(path))
remote = load_remote(str(path), {}, Settings.of(ranks=ranks, mesh="auto", cache=0.0, weights="replicated"))
references = {"reference_latents": [noise(1, 16, 6, 8, seed=6)]}
calls = {"text": {}, "ControlNet": {"control": True}, "reference image": references}
plain, results = sample(local), {}
for name, options in calls.items():
    expected = sample(local, **options)
    results[name] = {"changes": difference(expected, plain), "error": difference(sample(remote, **options), expected)}
try:
    sample(remote, control=True, **references)
except ValueError as error:
    results["refused"] = str(error)
results["after a refusal"] = {"error": difference(sample(remote), plain)}
remote.close_ranks()
print(json.dumps(results))
