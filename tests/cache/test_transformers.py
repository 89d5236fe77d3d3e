"""Every transformer that runs in parallel can be cached, and what its blocks are given stays as it was."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from para_core import apply_cache, model_cache_report, remove_cache
from para_core.adapters import apply_cache_on_transformer
from para_core.adapters.registry import adapter_for
from tests.tiny import relative_error
from zoo.tiny.transformers.registry import MODELS


def outputs(model, inputs):
    # HunyuanDiT takes residuals of a ControlNet out of the list that it is given.
    given = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with torch.no_grad():
        found = model(**given, return_dict=False)
    return torch.cat([x.flatten() for x in tree_leaves(found) if isinstance(x, torch.Tensor)])


# Blocks of these write keys for later calls, so they have no cache.
KEEP_KEYS = ("anyflow far", "wan animate 2")


@pytest.mark.parametrize("name", KEEP_KEYS)
def test_a_transformer_whose_blocks_keep_keys_cannot_be_cached(name):
    with pytest.raises(TypeError, match="blocks"):
        apply_cache_on_transformer(MODELS[name].build())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in KEEP_KEYS])
def test_every_transformer_has_skippable_blocks(name):
    model, inputs = MODELS[name].build(), MODELS[name].inputs(4, 6, 10)
    known = adapter_for(model)
    assert known is not None
    assert known.blocks is not None
    expected = outputs(model, inputs)

    given = []
    for stage in known.blocks.groups:
        for block_list in stage.lists:
            for block in model.get_submodule(block_list).children():
                block.register_forward_pre_hook(
                    lambda module, args, kwargs: given.extend(
                        (x, x.clone()) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)
                    ),
                    with_kwargs=True,
                )
    apply_cache(model, known.blocks, residual_diff_threshold=0.0)
    for _ in range(2):
        assert torch.equal(outputs(model, inputs), expected)
    # Stored residuals are differences to these.
    assert all(torch.equal(x, before) for x, before in given)

    apply_cache(model, known.blocks, residual_diff_threshold=1e9)
    outputs(model, inputs)
    # The same input: the stored residual is that of this step.
    assert relative_error(outputs(model, inputs), expected) < 1e-5
    asked = all(inputs.get(argument) is None for argument in known.blocks.uncached)
    assert model_cache_report(model).hits == (1 if asked else 0)
    remove_cache(model)
    assert torch.equal(outputs(model, inputs), expected)
