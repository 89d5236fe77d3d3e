"""Tokens and keys that a model's user adds where the plan has sharded the tokens."""

import re

import pytest
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from para_core.adapters import parallelize_transformer
from tests.adapters.test_transformers import SIZES, call
from tests.tiny import cpu_mesh
from zoo.tiny.transformers.registry import MODELS


def add_a_token(module, args):
    return (torch.cat([args[0], args[0][:, :1]], dim=1), *args[1:])


def add_tokens_in_a_block():
    model = parallelize_transformer(MODELS["pixart"].build(), mesh=cpu_mesh(1, 2))
    model.transformer_blocks[0].attn1.register_forward_pre_hook(add_a_token)
    call(model, "pixart", SIZES[0])


def read_cached_keys_of_an_image():
    model = MODELS["glm-image"].build()
    caches = GlmImageKVCache(num_layers=model.config.num_layers)
    parallelize_transformer(model, mesh=cpu_mesh(1, 2))
    for mode in ("write", "read"):
        caches.set_mode(mode)
        call(model, "glm-image", SIZES[0], kv_caches=caches)


@pytest.mark.parametrize(
    ("function", "module"),
    [(add_tokens_in_a_block, "AttnProcessor2_0"), (read_cached_keys_of_an_image, "GlmImageAttnProcessor")],
)
def test_added_tokens_raise_on_every_rank_and_name_the_module(rank_pool, function, module):
    for error in rank_pool.run_expecting_errors(function, 2):
        assert isinstance(error, ValueError)
        assert re.match(rf"{module} .*\d+ .*\d+\b.*unparallelize_pipe\(pipe\)", str(error))
