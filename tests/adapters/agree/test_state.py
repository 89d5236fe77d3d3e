"""State other than arguments is compared over ranks: dtypes, LoRAs, versions, and changes by callbacks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model

from para_core import version
from para_core.adapters import parallelize_pipe
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error


def loras(pipe):
    return {name: weight for name, weight in pipe.transformer.named_parameters() if "lora_" in name}


def fill(pipe, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in loras(pipe).values():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def pipe_with_lora(shared_parts=True):
    pipe = flux_pipe(shared_parts=shared_parts)
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], modules_to_save=["context_embedder"])
    pipe.transformer.add_adapter(config, "style")
    fill(pipe, seed=1)
    return pipe


def parallel_pipe(**options):
    heartbeat()
    return parallelize_pipe(pipe_with_lora(**options), mesh=cpu_mesh(1, 2))


def change_one_bit_in_data(pipe):
    # peft's hotswap writes through .data, which changes no version.
    [*loras(pipe).values()][-1].data.view(torch.int32)[-1, -1] ^= 1


def scale_one_layer(pipe):
    layer, *_ = (module for module in pipe.transformer.modules() if hasattr(module, "scaling"))
    layer.scaling["style"] = torch.tensor(0.5)


# What rank 1 changes between two calls, and the name of the difference.
CHANGES = [
    (lambda pipe: pipe.set_adapters(["style"], [0.5]), "LoRA of pipe.transformer"),
    (lambda pipe: pipe.disable_lora(), "LoRA of pipe.transformer"),
    (scale_one_layer, "LoRA of pipe.transformer"),
    (change_one_bit_in_data, "LoRA of pipe.transformer, weights"),
    # peft's wrapper passes on the bias of the copy that the LoRA uses.
    (lambda pipe: pipe.transformer.context_embedder.bias.data.add_(1), "LoRA of pipe.transformer, weights"),
    (lambda pipe: inject_adapter_in_model(LoraConfig(target_modules="conv_in"), pipe.vae.decoder), "LoRA of pipe.vae"),
    (lambda pipe: pipe.transformer.to(torch.bfloat16), "dtype of pipe.transformer"),
    (lambda pipe: pipe.vae.to(torch.bfloat16), "dtype of pipe.vae"),
    (lambda pipe: pipe.scheduler.register_to_config(shift=2.0), r"pipe\.scheduler"),
    (lambda _: mock.patch.object(version, "version_and_sources", lambda: "0.0.1").start(), "version of para_core"),
]


def change_on_one_rank():
    for change, name in CHANGES:
        of_vae = "pipe.vae" in name
        pipe, output_type = parallel_pipe(shared_parts=not of_vae), "pt" if of_vae else "latent"
        pipe(**flux_call(num_inference_steps=1, output_type=output_type))
        if dist.get_rank() == 1:
            change(pipe)
        try:
            with pytest.raises(ValueError, match=f"{name}: rank 0 .*, rank 1 "):
                pipe(**flux_call(output_type=output_type))
        finally:
            mock.patch.stopall()


def change_data(pipe, step, tensors):
    tensors["latents"].data.mul_(0.5)
    return {}


def raise_here(pipe, step, tensors):
    raise KeyError("only here")


# What the callback of rank 1 does, and what both ranks are told.
CALLBACKS = [
    (lambda pipe, step, tensors: {"latents": tensors["latents"] + 0.1 * step}, "values of latents: rank 0 "),
    (change_data, "values of latents: rank 0 "),
    (lambda pipe, _, tensors: {"prompt_embeds": tensors["prompt_embeds"].flip(1)}, "values of prompt_embeds: rank 0 "),
    (lambda pipe, step, x: {"latents": x["latents"][:, :-1]}, r"shape of latents: rank 0 .*1, 63, .*, rank 1 .*1, 62,"),
    (lambda pipe, _, x: {"prompt_embeds": [*x["prompt_embeds"]]}, r"shape of prompt_embeds: .*rank 1 has \[\d+, \d+\]"),
    (lambda pipe, step, x: {"latents": x["latents"].double()}, "dtype of latents: rank 0 .*float32, rank 1 .*float64"),
    (lambda pipe, step, tensors: change_one_bit_in_data(pipe), "LoRA of pipe.transformer, weights: rank 0 "),
    (lambda pipe, *_: setattr(pipe, "_interrupt", torch.tensor(True)), "interrupt: rank 0 .*False, rank 1 .*True"),
    (lambda pipe, *_: setattr(pipe, "_interrupt", torch.zeros(2)), "Boolean value of Tensor with more than one"),
    (raise_here, r"rank 1: .*callback .*KeyError: 'only here'"),
]


def call_back(pipe, callback):
    names = ["latents", "prompt_embeds"]
    return pipe(**flux_call(callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names)).images


def change_equally(pipe, step, timestep, tensors):
    """Change tensors and the LoRA equally. One rank returns a copy where the other returns the same tensor."""
    if step > 0:
        return {}
    fill(pipe, seed=3)
    prompt = tensors["prompt_embeds"]
    is_copied = dist.is_initialized() and dist.get_rank()
    return {"latents": tensors["latents"] * 0.5, "prompt_embeds": prompt.clone() if is_copied else prompt}


def call_back_on_one_rank_and_equally():
    for change, message in CALLBACKS:

        def callback(pipe, step, timestep, tensors, change=change):
            changed = change(pipe, step, tensors) if dist.get_rank() == 1 else None
            return tensors if changed is None else changed

        raises_itself = change is raise_here and dist.get_rank() == 1
        error = KeyError if raises_itself else (ValueError, RuntimeError)
        with pytest.raises(error, match="only here" if raises_itself else message):
            call_back(parallel_pipe(), callback)
    plain, expected = pipe_with_lora()(**flux_call()).images, call_back(pipe_with_lora(), change_equally)
    assert relative_error(parallel_pipe()(**flux_call()).images, plain) < 1e-5
    assert relative_error(call_back(parallel_pipe(), change_equally), expected) < 1e-5
    with torch.inference_mode():
        assert relative_error(call_back(parallel_pipe(), change_equally), expected) < 1e-5


@pytest.mark.parametrize("job", [change_on_one_rank, call_back_on_one_rank_and_equally])
def test_differing_models_and_callbacks_raise_on_all_ranks(rank_pool, job):
    rank_pool.run(job, 2)
