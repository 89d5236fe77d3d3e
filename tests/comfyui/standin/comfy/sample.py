"""A sampler of a few lines, with both branches of guidance in one call."""

import uuid

import torch

import comfy.model_management


def sample(patcher, noise, context, steps=4, cfg=3.0, **conditions):
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    x, uuids, sigmas = noise, [uuid.uuid4(), uuid.uuid4()], torch.linspace(1, 0, steps + 1)
    for step in range(steps):
        options = {**patcher.model_options["transformer_options"], "uuids": uuids, "cond_or_uncond": [0, 1]}
        options |= {"sigmas": sigmas[step : step + 1], "sample_sigmas": sigmas, "prefetch_dynamic_vbars": False}
        both = torch.cat([x, x]), sigmas[step].expand(2) * 1000, torch.cat([context, torch.zeros_like(context)])
        positive, negative = patcher.model.apply_model(*both, options, **conditions).chunk(2)
        x = x + (sigmas[step + 1] - sigmas[step]) * (negative + cfg * (positive - negative))
    return x
