"""Every transformer that runs in parallel can be cached, and the inputs of its blocks stay unchanged."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from para_core import apply_cache, model_cache_report, remove_cache
from para_core.adapters import apply_cache_on_transformer
from para_core.adapters.registry import adapter_for
from tests.tiny import relative_error
from zoo.tiny.transformers.registry import MODELS


def outputs(model, inputs):
    # HunyuanDiT removes a ControlNet's residuals from the list that it receives.
    kwargs = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with torch.no_grad():
        output = model(**kwargs, return_dict=False)
    return torch.cat([x.flatten() for x in tree_leaves(output) if isinstance(x, torch.Tensor)])


# The blocks of these models write keys for later calls, so they have no cache.
KEEP_KEYS = ("anyflow far", "wan animate 2")


@pytest.mark.parametrize("name", KEEP_KEYS)
def test_a_transformer_whose_blocks_keep_keys_cannot_be_cached(name):
    with pytest.raises(TypeError, match="blocks"):
        apply_cache_on_transformer(MODELS[name].build())


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in KEEP_KEYS])
def test_every_transformer_has_skippable_blocks(name):
    model, inputs = MODELS[name].build(), MODELS[name].inputs(4, 6, 10)
    # Each step has another timestep. It changes so little that the stored residual is almost that of the step.
    clock = next(name for name in inputs if "time" in name or name == "t")
    inputs[clock] = inputs[clock].float()
    later = {**inputs, clock: inputs[clock] * (1 - 1e-6)}
    adapter = adapter_for(model)
    assert adapter is not None
    assert adapter.blocks is not None
    expected, expected_later = outputs(model, inputs), outputs(model, later)

    block_inputs = []
    for stage in adapter.blocks.groups:
        for block_list in stage.lists:
            for block in model.get_submodule(block_list).children():
                block.register_forward_pre_hook(
                    lambda module, args, kwargs: block_inputs.extend(
                        (x, x.clone()) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)
                    ),
                    with_kwargs=True,
                )
    apply_cache(model, adapter.blocks, residual_diff_threshold=0.0)
    assert torch.equal(outputs(model, inputs), expected)
    assert torch.equal(outputs(model, later), expected_later)
    # Stored residuals are differences from the blocks' inputs, so nothing may change these in place.
    assert all(torch.equal(x, before) for x, before in block_inputs)

    apply_cache(model, adapter.blocks, residual_diff_threshold=1e9)
    outputs(model, inputs)
    assert relative_error(outputs(model, later), expected_later) < 1e-2
    cacheable = all(inputs.get(argument) is None for argument in adapter.blocks.uncached)
    assert model_cache_report(model).hits == (1 if cacheable else 0)
    remove_cache(model)
    assert torch.equal(outputs(model, inputs), expected)
