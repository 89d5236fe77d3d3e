import importlib

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher


def load_diffusion_model(unet_path, model_options=None, disable_dynamic=False):
    weights = load_file(unet_path)
    with safe_open(unet_path, "pt") as file:
        module, _, name = file.metadata()["class"].rpartition(".")
    model = BaseModel(getattr(importlib.import_module(module), name), (model_options or {}).get("dtype", torch.float32))
    model.diffusion_model.load_state_dict(weights)
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
