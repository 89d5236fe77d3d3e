"""State other than arguments is compared over ranks: dtypes, LoRAs, versions, and changes by callbacks."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from para_core import version
from para_core.adapters import parallelize_pipe
from para_core.adapters.agree.arguments import PendingRecord
from para_core.adapters.agree.loras import describe_loras
from tests.rank_pool import RankPoolError
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error


def fill(pipe, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def pipe_with_lora():
    pipe = flux_pipe(shared_parts=False)  # The dtype of the VAE differs between ranks in one case.
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), "style")
    fill(pipe, seed=1)
    return pipe


def other_weights(pipe):
    fill(pipe, seed=2)


def weights_in_data(pipe):
    # peft's hotswap writes through .data, which changes no version.
    for name, weight in pipe.transformer.named_parameters():
        if "lora_" in name:
            weight.data.copy_(-weight.data)


def one_bit_in_data(pipe):
    *_, last = (weight for name, weight in pipe.transformer.named_parameters() if "lora_" in name)
    last.data.view(torch.int32)[-1, -1] ^= 1


def other_weights_hotswapped(pipe):
    weights = {
        f"transformer.{name.replace('.style', '')}": torch.randn(weight.shape)
        for name, weight in pipe.transformer.named_parameters()
        if "lora_" in name
    }
    pipe.load_lora_weights(weights, adapter_name="style", hotswap=True)


def one_scale(pipe):
    layer, *_ = (module for module in pipe.transformer.modules() if hasattr(module, "scaling"))
    layer.scaling["style"] = torch.tensor(0.5)


def other_scale(pipe):
    pipe.set_adapters(["style"], [0.5])


def no_lora(pipe):
    pipe.disable_lora()


def other_dtype(pipe):
    pipe.transformer.to(torch.bfloat16)


def other_vae(pipe):
    pipe.vae.to(torch.bfloat16)


def other_version(pipe):
    mock.patch.object(version, "version_and_sources", lambda: "0.0.1").start()


DIFFERENCES = {
    "LoRA of pipe.transformer": [other_scale, no_lora, one_scale],
    "LoRA of pipe.transformer, weights": [
        other_weights,
        weights_in_data,
        one_bit_in_data,
        other_weights_hotswapped,
    ],
    "dtype of pipe.transformer": [other_dtype],
    "dtype of pipe.vae": [other_vae],
    "version of para_core": [other_version],
}


def call_after(change):
    pipe = parallelize_pipe(pipe_with_lora(), mesh=cpu_mesh(1, 2))
    output_type = "pt" if change is other_vae else "latent"
    pipe(**flux_call(num_inference_steps=1, output_type=output_type))
    if dist.get_rank() == 1:
        change(pipe)
    try:
        pipe(**flux_call(output_type=output_type))
    finally:
        mock.patch.stopall()
        pipe.vae.to(torch.float32)  # All pipes of this process share the VAE.


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("what", "change"), [(what, change) for what, changes in DIFFERENCES.items() for change in changes]
)
def test_differing_models_raise_on_all_ranks(rank_pool, what, change):
    with pytest.raises(RankPoolError, match=rf"ValueError: .*{what}: rank 0 .*, rank 1 ") as error:
        rank_pool.run(call_after, 2, change)
    assert "raised on 2 of 2 ranks" in str(error.value)


def call_with_the_same_lora():
    return parallelize_pipe(pipe_with_lora(), mesh=cpu_mesh(1, 2))(**flux_call()).images


def test_the_same_lora_on_all_ranks_is_exact(rank_pool):
    expected = pipe_with_lora()(**flux_call()).images
    for out in rank_pool.run(call_with_the_same_lora, 2):
        assert relative_error(out, expected) < 1e-5


# -- Callbacks.


def here(tensors, changed):
    return {**tensors, **(changed if dist.get_rank() == 1 else {})}


def changes_latents(pipe, step, timestep, tensors):
    return here(tensors, {"latents": tensors["latents"] + 0.1})


def changes_in_place(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        tensors["latents"].mul_(0.5)
    return tensors


def changes_data(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        tensors["latents"].data.mul_(0.5)
    return {}


def changes_at_the_end(pipe, step, timestep, tensors):
    return here(tensors, {"latents": tensors["latents"] + 0.1}) if step == 1 else {}


def changes_lora_data(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        weights_in_data(pipe)
    return tensors


def changes_prompt(pipe, step, timestep, tensors):
    return here(tensors, {"prompt_embeds": tensors["prompt_embeds"].flip(1)})


def changes_size(pipe, step, timestep, tensors):
    return here(tensors, {"latents": tensors["latents"][:, :-1]})


def changes_dtype(pipe, step, timestep, tensors):
    return here(tensors, {"latents": tensors["latents"].double()})


def changes_lora(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        fill(pipe, seed=2)
    return tensors


def interrupts(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        pipe._interrupt = True
    return tensors


TOLD = {
    changes_latents: "values of latents: rank 0 ",
    changes_in_place: "values of latents: rank 0 ",
    changes_data: "values of latents: rank 0 ",
    changes_at_the_end: "values of latents: rank 0 ",
    changes_lora_data: "LoRA of pipe.transformer, weights: rank 0 ",
    changes_prompt: "values of prompt_embeds: rank 0 ",
    changes_size: r"shape of latents: rank 0 .*\[1, 63, \d+\], rank 1 .*\[1, 62,",
    changes_dtype: "dtype of latents: rank 0 .*float32, rank 1 .*float64",
    changes_lora: "LoRA of pipe.transformer, weights: rank 0 ",
    interrupts: "interrupt: rank 0 .*False, rank 1 .*True",
}


def call_back(callback, names=("latents", "prompt_embeds")):
    pipe = parallelize_pipe(pipe_with_lora(), mesh=cpu_mesh(1, 2))
    return pipe(**flux_call(callback_on_step_end=callback, callback_on_step_end_tensor_inputs=list(names))).images


@pytest.mark.sample(5)
@pytest.mark.parametrize("callback", TOLD)
def test_differing_callbacks_raise_on_all_ranks(rank_pool, callback):
    with pytest.raises(RankPoolError, match=TOLD[callback]) as error:
        rank_pool.run(call_back, 2, callback)
    assert "raised on 2 of 2 ranks" in str(error.value)


def raises_on_one(pipe, step, timestep, tensors):
    if dist.get_rank() == 1:
        raise KeyError("only here")
    return tensors


def test_exception_in_callback_is_raised_on_all_ranks(rank_pool):
    first, second = rank_pool.run_expecting_errors(call_back, 2, raises_on_one)
    assert isinstance(second, KeyError)
    assert isinstance(first, RuntimeError)
    assert re.search(r"rank 1: .*callback .*KeyError: 'only here'", str(first))


def alike(pipe, step, timestep, tensors):
    """Change tensors and the LoRA equally on all ranks. One rank returns a copy where the other returns the same
    tensor.
    """
    if step == 0:
        fill(pipe, seed=3)
        prompt = tensors["prompt_embeds"]
        return {
            "latents": tensors["latents"] * 0.5,
            "prompt_embeds": prompt.clone() if dist.is_initialized() and dist.get_rank() else prompt,
        }
    return {}


def test_callbacks_that_change_the_same_are_exact(rank_pool):
    options = {"callback_on_step_end": alike, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    expected = pipe_with_lora()(**flux_call(**options)).images
    for out in rank_pool.run(call_back, 2, alike):
        assert relative_error(out, expected) < 1e-5


def test_loras_are_described_by_settings_and_values():
    def text():
        return PendingRecord(describe_loras(pipe)).wait()

    pipe = pipe_with_lora()
    first = text()
    assert text() == first
    changes = (other_scale, other_weights, weights_in_data, one_bit_in_data, one_scale, no_lora)
    seen = [first]
    for change in changes:
        change(pipe)
        seen.append(text())
    assert all(x not in seen[:index] for index, x in enumerate(seen))
    pipe.transformer.delete_adapters("style")
    assert text() == {}


def call_in_inference_mode():
    pipe = parallelize_pipe(pipe_with_lora(), mesh=cpu_mesh(1, 2))
    with torch.inference_mode():
        same = pipe(
            **flux_call(callback_on_step_end=alike, callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"])
        ).images
        with pytest.raises(ValueError, match="values of latents"):
            pipe(**flux_call(callback_on_step_end=changes_in_place))
    return same.clone()


def test_callbacks_are_compared_in_inference_mode_too(rank_pool):
    options = {"callback_on_step_end": alike, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    expected = pipe_with_lora()(**flux_call(**options)).images
    for out in rank_pool.run(call_in_inference_mode, 2):
        assert relative_error(out, expected) < 1e-5
