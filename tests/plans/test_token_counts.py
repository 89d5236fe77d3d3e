"""A model's user adds tokens and keys after the plan has sharded the tokens."""

import re

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from para_core.adapters import parallelize_pipe, parallelize_transformer
from tests.adapters.test_transformers import SIZES, call
from tests.tiny import cpu_mesh, flux_call, flux_pipe
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


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


class WeighingProcessor(FluxAttnProcessor):
    """A user's processor that scales image tokens, in blocks where image and text are separate."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, token_weights=None, **kwargs):
        if encoder_hidden_states is not None and isinstance(token_weights, torch.Tensor):
            hidden_states = hidden_states * token_weights
        elif encoder_hidden_states is not None and token_weights is not None:
            hidden_states = hidden_states[:, token_weights["keep"][0]]
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def weigh_tokens(token_weights):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe.transformer.set_attn_processor(WeighingProcessor())
    pipe(**flux_call(joint_attention_kwargs={"token_weights": token_weights}))


@pytest.mark.parametrize(
    ("token_weights", "name"),
    [
        (torch.rand(1, 63, 1), r"joint_attention_kwargs\['token_weights'\] \[1, 63, 1\]"),
        (
            {"keep": [torch.ones(63, dtype=torch.bool)]},
            r"joint_attention_kwargs\['token_weights'\]\['keep'\]\[0\] \[63\]",
        ),
    ],
    ids=["weights", "mask in a dict"],
)
def test_tensor_for_all_tokens_in_a_dict_is_named_on_every_rank(rank_pool, token_weights, name):
    for rank, error in enumerate(rank_pool.run_expecting_errors(weigh_tokens, 2, token_weights)):
        assert isinstance(error, ValueError)
        assert re.search(rf"FluxTransformer2DModel .*{name}.* {32 - rank} ", str(error))


def weigh_wrongly():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe.transformer.set_attn_processor(WeighingProcessor())
    pipe(**flux_call(joint_attention_kwargs={"token_weights": torch.rand(1, 7, 1)}))


def test_other_errors_of_sizes_stay_as_they_are(rank_pool):
    for error in rank_pool.run_expecting_errors(weigh_wrongly, 2):
        assert isinstance(error, RuntimeError)
        assert "(7)" in str(error)
