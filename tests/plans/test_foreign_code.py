"""A user's own code inside a planned model is named once, and only if it sees the tokens of one rank."""

import functools
import warnings

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from torch import nn

from para_core import ForeignCodeWarning
from para_core.adapters import Adapter, parallelize_transformer, parallelize_unet
from para_core.adapters.models.flux import FLUX
from para_core.plans.foreign_code import find_foreign_code
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer
from zoo.tiny.pipelines.unet import UNET_PIPELINES


class Subclass(FluxTransformer2DModel):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states - hidden_states.mean(1, keepdim=True), **kwargs)


class Mixing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x - x.mean(1, keepdim=True))


class FirstTokens(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, torch.cat([2 * hidden_states[:, :13], hidden_states[:, 13:]], 1), *args, **kwargs)


def as_class(cls):
    return cls.from_config(flux_transformer().config).eval()


def observe(module, args):
    return None


def with_submodule(model):
    model.transformer_blocks[1].ff = Mixing(model.transformer_blocks[1].ff)


def with_hook(hook):
    return lambda model: model.transformer_blocks[0].register_forward_pre_hook(hook)


def with_forward(model):
    block = model.transformer_blocks[0]
    block.norm1.forward = functools.partial(block.norm1.forward)
    block.ff.forward = lambda x: x


def at_many_places(model):
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda *_: None)
        block.attn.set_processor(FirstTokens())


# A class of torch in which the user has replaced a method.
Patched = type("Patched", (nn.Identity,), {"__module__": "torch.nn", "forward": observe})
CHANGES = {
    "module": (with_submodule, ["Mixing at 'transformer_blocks.1.ff'"]),
    "hook": (with_hook(observe), ["observe at 'transformer_blocks.0'"]),
    "forward": (with_forward, ["'transformer_blocks.0.ff'"]),
    "method of a class": (lambda model: model.add_module("extra", Patched()), ["of Patched at 'extra'"]),
    "many places": (
        at_many_places,
        ["<lambda> at 'transformer_blocks.0'", "FirstTokens at 'transformer_blocks.0.attn'"],
    ),
    "hook of torch": (with_hook(torch.compiler.is_compiling), []),
    "lora": (lambda model: model.add_adapter(LoraConfig(r=2, target_modules=["to_q"])), []),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_each_kind_of_code_is_named_by_its_place(name):
    change, expected = CHANGES[name]
    model = flux_transformer()
    change(model)
    phrases = find_foreign_code(model, FluxTransformer2DModel)
    assert all(part in phrase for phrase, part in zip(phrases, expected, strict=True))


def test_package_and_class_of_the_plan_are_known():
    mixing = Mixing(Mixing(nn.Identity()))
    for model, planned_class, expected in [
        (as_class(Subclass), FluxTransformer2DModel, 1),
        (as_class(Subclass), Subclass, 0),
        # A subclass counts only if it overrides the forward.
        (as_class(type("SameForward", (FluxTransformer2DModel,), {})), FluxTransformer2DModel, 0),
        (nn.Sequential(mixing), nn.Sequential, 1),
        (mixing, Mixing, 0),
    ]:
        assert len(find_foreign_code(model, planned_class)) == expected
    mixing.inner.register_forward_hook(observe)
    assert len(find_foreign_code(mixing, Mixing)) == 1


def warned(run, *args, **kwargs):
    """Return the texts of the warnings of foreign code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args, **kwargs)
    return [str(x.message) for x in caught if x.category is ForeignCodeWarning]


def warned_at_each_step():
    """Return the warnings of a model, in two calls and after another change, of a subclass, and of a UNet."""
    model = flux_transformer()
    with_submodule(model)

    def run():
        with torch.no_grad():
            model(**flux_inputs(13, 5))

    texts = [warned(parallelize_transformer, model, mesh=cpu_mesh(1, 2)), warned(run), warned(run)]
    model.transformer_blocks[1].register_forward_hook(lambda *_: None)
    texts += [warned(run), warned(run)]

    # An adapter for the class knows its code.
    adapter = Adapter(transformer="Subclass", pipelines="none", plan=FLUX.plan, blocks=FLUX.blocks)
    for options in ({"adapter": adapter}, {}):
        texts.append(warned(parallelize_transformer, as_class(Subclass), mesh=cpu_mesh(1, 2), **options))

    unet = UNET_PIPELINES["sd"].build().unet
    unet.mid_block.register_forward_pre_hook(observe)
    text = torch.randn(1, 7, unet.config.cross_attention_dim)
    inputs = {"sample": torch.randn(1, unet.config.in_channels, 8, 8), "timestep": 1, "encoder_hidden_states": text}
    texts.append(warned(lambda: parallelize_unet(unet, mesh=cpu_mesh(1, 2))(**inputs)))
    unet.conv_in.register_forward_hook(lambda *_: None)
    return [*texts, warned(unet, **inputs)]


def test_a_model_warns_once_and_again_for_new_code(rank_pool):
    for texts in rank_pool.run(warned_at_each_step, 2):
        assert [len(each) for each in texts] == [1, 0, 0, 1, 0, 0, 1, 1, 1]
        assert "Mixing" in texts[0][0] and "verify=True" in texts[0][0]
        for index, place in ((3, "transformer_blocks.1"), (6, "Subclass"), (7, "mid_block"), (8, "conv_in")):
            assert place in texts[index][0]
