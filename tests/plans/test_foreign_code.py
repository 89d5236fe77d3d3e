"""A user's own code inside a planned model is named once, and only if it sees the tokens of one rank."""

import copy
import functools
import warnings

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from torch import nn

import para_core
from para_core import ForeignCodeWarning, Plan
from para_core.adapters import Adapter, parallelize_transformer, parallelize_unet
from para_core.adapters.models.flux import FLUX
from para_core.plans.foreign_code import find_foreign_code
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer
from zoo.tiny.pipelines.unet import UNET_PIPELINES


class Subclass(FluxTransformer2DModel):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states - hidden_states.mean(1, keepdim=True), **kwargs)


class SameForward(FluxTransformer2DModel):
    """A subclass that adds a method and keeps the forward."""

    def size(self):
        return sum(x.numel() for x in self.parameters())


class Mixing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x - x.mean(1, keepdim=True))


class FirstTokens(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, torch.cat([2 * hidden_states[:, :13], hidden_states[:, 13:]], 1), *args, **kwargs)


class Hook:
    def __call__(self, module, *args):
        return None


def as_class(cls):
    model = cls.from_config(flux_transformer().config)
    return model.eval()


def observe(module, args):
    return None


def with_submodule(model):
    model.transformer_blocks[1].ff = Mixing(model.transformer_blocks[1].ff)


def with_processor(model):
    model.single_transformer_blocks[0].attn.set_processor(FirstTokens())


def with_hook(hook):
    def change(model):
        model.transformer_blocks[0].register_forward_pre_hook(hook)

    return change


def with_forward(model):
    block = model.transformer_blocks[0]
    block.norm1.forward = functools.partial(block.norm1.forward)
    block.ff.forward = lambda x: x


def with_lora(model):
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))


CHANGES = {
    "module": (with_submodule, ["Mixing at 'transformer_blocks.1.ff'"]),
    "processor": (with_processor, ["FirstTokens at 'single_transformer_blocks.0.attn'"]),
    "hook": (with_hook(observe), ["observe at 'transformer_blocks.0'"]),
    "partial": (with_hook(functools.partial(observe)), ["observe at 'transformer_blocks.0'"]),
    "callable": (with_hook(Hook()), ["Hook at 'transformer_blocks.0'"]),
    "forward": (with_forward, ["'transformer_blocks.0.ff'"]),
    "hook of torch": (with_hook(torch.compiler.is_compiling), []),
    "lora": (with_lora, []),
    "copy": (copy.deepcopy, []),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_each_kind_of_code_is_named_by_its_place(name):
    change, expected = CHANGES[name]
    model = flux_transformer()
    change(model)
    phrases = find_foreign_code(model, FluxTransformer2DModel)
    assert len(phrases) == len(expected)
    for phrase, part in zip(phrases, expected, strict=True):
        assert part in phrase


def test_the_same_code_at_many_places_is_named_once():
    model = flux_transformer()
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda *_: None)
        block.attn.set_processor(FirstTokens())
    assert len(find_foreign_code(model, FluxTransformer2DModel)) == 2


def test_method_replaced_on_a_diffusers_class_is_named(monkeypatch):
    model = flux_transformer()
    monkeypatch.setattr(type(model.norm_out), "forward", functools.wraps(type(model.norm_out).forward)(lambda *_: None))
    assert len(find_foreign_code(model, FluxTransformer2DModel)) == 1


def test_forward_replaced_on_the_class_is_named(monkeypatch):
    forward = FluxTransformer2DModel.forward

    def cached(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(FluxTransformer2DModel, "forward", cached)
    (phrase,) = find_foreign_code(flux_transformer(), FluxTransformer2DModel)
    assert "test_foreign_code" in phrase


def test_a_hook_on_a_model_of_the_same_package_is_named():
    model = Mixing(nn.Linear(1, 1))
    model.inner.register_forward_hook(observe)
    assert len(find_foreign_code(model, Mixing)) == 1


def test_a_subclass_counts_only_if_it_overrides_the_forward():
    assert "Subclass" in find_foreign_code(as_class(Subclass), FluxTransformer2DModel)[0]
    assert find_foreign_code(as_class(Subclass), Subclass) == []
    assert find_foreign_code(as_class(SameForward), FluxTransformer2DModel) == []


def test_the_package_of_the_planned_class_is_known():
    model = nn.Sequential(Mixing(nn.Identity()))
    assert find_foreign_code(model, nn.Sequential) != []
    assert find_foreign_code(Mixing(Mixing(nn.Identity())), Mixing) == []


def warned_at_each_step(change):
    """Return the numbers of warnings when a model is parallelized, in two calls, and after a second change."""
    model, counts = flux_transformer(), []
    change(model)

    def warned(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        counts.append([str(x.message) for x in caught if x.category is ForeignCodeWarning])

    with torch.no_grad():
        warned(lambda: parallelize_transformer(model, mesh=cpu_mesh(1, 2)))
        for _ in range(2):
            warned(lambda: model(**flux_inputs(13, 5)))
        model.transformer_blocks[1].register_forward_hook(lambda *_: None)
        for _ in range(2):
            warned(lambda: model(**flux_inputs(13, 5)))
    return counts


def test_a_model_warns_once_and_again_for_new_code(rank_pool):
    for at_first, *calls, later, last in rank_pool.run(warned_at_each_step, 2, with_submodule):
        assert len(at_first) == 1 and "Mixing" in at_first[0] and "verify=True" in at_first[0]
        assert calls == [[], []]
        assert len(later) == 1 and "transformer_blocks.1" in later[0]
        assert last == []


def with_an_adapter():
    model = as_class(Subclass)
    adapter = Adapter(transformer="Subclass", pipelines="none", plan=FLUX.plan, blocks=FLUX.blocks)
    assert isinstance(adapter.plan, Plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_transformer(model, mesh=cpu_mesh(1, 2), adapter=adapter)
    with pytest.warns(para_core.ForeignCodeWarning, match="Subclass"):
        parallelize_transformer(model, mesh=cpu_mesh(1, 2))
    return True


def test_an_adapter_for_the_subclass_silences_the_warning(rank_pool):
    assert all(rank_pool.run(with_an_adapter, 2))


def hook_on_a_unet():
    """Return the warnings of a UNet with a hook when it is parallelized, and after another hook was added."""
    unet, texts = UNET_PIPELINES["sd"].build().unet, []
    unet.mid_block.register_forward_pre_hook(observe)
    text = torch.randn(1, 7, unet.config.cross_attention_dim)
    inputs = {"sample": torch.randn(1, unet.config.in_channels, 8, 8), "timestep": 1, "encoder_hidden_states": text}
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not texts:
                parallelize_unet(unet, mesh=cpu_mesh(1, 2))
            unet(**inputs)
        texts.append([str(x.message) for x in caught if x.category is ForeignCodeWarning])
        unet.conv_in.register_forward_hook(Hook())
    return texts


def test_hooks_in_a_unet_see_rows(rank_pool):
    for first, second in rank_pool.run(hook_on_a_unet, 2):
        assert len(first) == 1 and "mid_block" in first[0]
        assert len(second) == 1 and "conv_in" in second[0]
