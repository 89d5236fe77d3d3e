"""All transformers of a pipeline become parallel, not only the first."""

from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines import MiniMaxH3Blocks
from torch import nn
from torch.distributed.tensor import DTensor

from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    remove_cache_from_pipe,
    shard_weights,
    unparallelize_pipe,
)
from para_core.adapters.inspect.components import components_of
from para_core.adapters.registry import applied_mesh, transformers_of
from para_core.instance.modules import uncompiled
from tests.adapters.test_pipelines import build, generate
from tests.tiny import cpu_mesh
from zoo.tiny.pipelines.components import image_vae
from zoo.tiny.pipelines.encoders import umt5
from zoo.tiny.pipelines.image import qwen_controlled
from zoo.tiny.transformers.registry import MODELS


def work_by_transformer():
    """Return the tokens of each transformer on a sequence mesh, and the calls of each on a batch mesh."""
    names = "transformer", "unconditional_transformer"
    num_tokens, calls = {}, dict.fromkeys(names, 0)
    pipe, guided = (build("ideogram 4", cpu_mesh(1, 2)), build("ideogram 4", cpu_mesh(1, 1, batch=2)))
    for name in names:

        def note_tokens(module, args, kwargs, name=name):
            num_tokens[name] = (args[0] if args else kwargs["hidden_states"]).shape[1]

        def note_call(module, args, name=name):
            calls[name] += 1

        getattr(pipe, name).layers[0].register_forward_pre_hook(note_tokens, with_kwargs=True)
        getattr(guided, name).layers[0].register_forward_pre_hook(note_call)
    generate(pipe, "ideogram 4", num_inference_steps=1)
    generate(guided, "ideogram 4")
    return [num_tokens[name] for name in names], [calls[name] for name in names]


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_ideogram_4_shares_tokens_and_branches_of_two_transformers(rank_pool):
    # The first transformer has 9 text tokens and 15 image tokens. The second has the 15 image tokens only. The outputs
    # of blocks cannot be predicted, so both ranks compute the first of three steps.
    assert rank_pool.run(work_by_transformer, 2) == [([12, 8], [3, 1]), ([12, 7], [1, 3])]


def h3_pipe():
    """Return MiniMax H3, whose second transformer takes references. Only diffusers reads the class of its VAEs."""
    pipe = MiniMaxH3Blocks().init_pipeline()
    model = MODELS["minimax-h3"]
    pipe.update_components(
        transformer=model.build(), transformer_ref=model.build(2), text_encoder=umt5()["text_encoder"]
    )
    return pipe


@pytest.mark.filterwarnings("ignore:.*cache ")
@pytest.mark.parametrize(
    ("name", "second"), [("wan 2.2", "transformer_2"), ("ideogram 4", "unconditional_transformer")]
)
def test_transformer_under_two_names_is_cached_once(name, second):
    pipe = build(name)
    setattr(pipe, second, pipe.transformer)
    expected = generate(pipe, name)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    assert torch.equal(generate(pipe, name), expected)
    assert len({row.branch for row in cache_report(pipe).rows}) == 2


def test_transformers_are_found_by_type():
    pipe = h3_pipe()
    assert list(transformers_of(pipe)) == ["transformer", "transformer_ref"]
    pipe.transformer_ref = torch.compile(pipe.transformer_ref, backend="eager")
    assert transformers_of(pipe)["transformer_ref"] is uncompiled(pipe.transformer_ref)
    assert components_of(pipe).keys() == {"transformer", "transformer_ref", "text_encoder"}
    controlnet = qwen_controlled("QwenImageControlNetPipeline").controlnet
    others = {"vae": image_vae(), "controlnet": controlnet, "prior": nn.Linear(2, 2)}
    assert transformers_of(SimpleNamespace(**others, denoiser=pipe.transformer)) == {"denoiser": pipe.transformer}
    # A usual name may hold a transformer that the user describes by adapter=.
    assert list(transformers_of(SimpleNamespace(**others, transformer=nn.Linear(2, 2)))) == ["transformer"]


def apply_and_undo_on_h3():
    pipe, mesh = h3_pipe(), cpu_mesh(1, 2)
    apply_cache_on_pipe(
        parallelize_pipe(pipe, mesh=mesh), per_transformer={"transformer_ref": {"residual_diff_threshold": 0.0}}
    )
    shard_weights(pipe, mesh, components=["transformer_ref"])
    sharded = [type(x).__name__ for x in pipe.transformer_ref.parameters() if isinstance(x, DTensor)]
    applied = applied_mesh(pipe.transformer_ref)
    remove_cache_from_pipe(pipe)
    with pytest.raises(RuntimeError, match=r"pipe\.transformer_ref .*from_pretrained"):
        unparallelize_pipe(pipe)
    pipe = parallelize_pipe(h3_pipe(), mesh=mesh)
    unparallelize_pipe(pipe)
    return len(sharded) > 0, applied is not None, applied_mesh(pipe.transformer_ref) is None


def test_second_transformer_is_sharded_and_undone(rank_pool):
    assert rank_pool.run(apply_and_undo_on_h3, 2) == [(True, True, True)] * 2
