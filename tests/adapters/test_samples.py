"""Ranks along a batch mesh dim get their samples of every tensor, or an error names the tensor."""

import inspect
import re
from dataclasses import replace

import diffusers
import pytest
import torch

from benchmarks.harness import fake_group
from para_core import ParallelWarning
from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.adapters.models import ADAPTERS
from para_core.adapters.parallel.call import parallel_call
from para_core.adapters.parallel.transformer import TransformerPart
from para_core.plans.samples import count_samples, holds_tensor
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.transformers.registry import MODELS

BATCHED = {adapter.transformer: adapter for adapter in ADAPTERS if adapter.plan is not None and adapter.plan.batched}
# A parameter that is annotated with only these types holds no tensor.
PLAIN = r"(int|float|bool|str|None|list|tuple|typing|Union|Optional|class|[\[\],|<>'. ])+"


@pytest.mark.parametrize("name", BATCHED)
def test_tensor_parameters_are_batched_or_declared_common(name):
    plan, parameters = BATCHED[name].plan, inspect.signature(getattr(diffusers, name).forward).parameters
    may_hold = {key for key, p in parameters.items() if not re.fullmatch(PLAIN, str(p.annotation))}
    for model in MODELS.values():
        if model.cls == name:
            may_hold |= {key for key, value in model.inputs(3, 6, 10).items() if holds_tensor(value)}
    declared = {*plan.batched, *plan.common, *plan.unshared, *plan.refused}
    assert may_hold - {"self", "return_dict"} <= declared <= set(parameters)


def test_perturbed_attention_shares_no_samples():
    for name, shares in (("pixart", True), ("pixart, perturbed", False)):
        with fake_group(2):
            pipe = parallelize_pipe(PIPELINES[name].build(), mesh=cpu_mesh(1, 1, batch=2))
            (part,) = [part for part in parallel_call(pipe).session.parts if isinstance(part, TransformerPart)]
        assert type(pipe.transformer).__name__ == "PixArtTransformer2DModel"
        assert bool(part.plan.batched) == shares


@torch.no_grad()
def call_on_batch_mesh():
    model, mesh = MODELS["sd3"], cpu_mesh(1, 1, batch=2)
    transformer, inputs = parallelize_transformer(model.build(), mesh=mesh), model.inputs(3, 6, 10)
    expected = model.build()(**inputs).sample
    num_samples = []
    transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: num_samples.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    tokens = inputs.pop("hidden_states")
    assert relative_error(transformer(tokens, **inputs).sample, expected) < 1e-5
    for args, kwargs, message in (
        ((tokens,), {**inputs, "guidance": 3.0}, "'guidance'"),
        ((tokens,), {**inputs, "hidden_states": tokens}, "multiple .*'hidden_states'"),
        ((tokens, *inputs.values(), *[None] * 5), {}, "positional"),
        ((), inputs, "missing .*'hidden_states'"),
    ):
        with pytest.raises(TypeError, match=message):
            transformer(*args, **kwargs)
    assert count_samples(tokens.sum(), 0) is None
    with pytest.raises(ValueError, match="timestep has 3"):
        transformer(tokens, **{**inputs, "timestep": torch.ones(3)})
    with pytest.warns(ParallelWarning, match=r"1 sample.* 2 ranks .*'batch'") as warned:
        outs = [transformer(tokens[:1], **{key: x[:1] for key, x in inputs.items()}).sample for _ in range(2)]
    assert max(relative_error(out, expected[:1]) for out in outs) < 1e-5
    assert num_samples == [1, 1, 1]
    assert len(warned) == 1
    adapter = BATCHED["SD3Transformer2DModel"]
    plan = replace(adapter.plan, batched={"hidden_states": 0, "timestep": 0})
    parallelize_transformer(transformer, mesh=mesh, adapter=replace(adapter, plan=plan))
    with pytest.raises(ValueError, match=r"encoder_hidden_states, pooled_projections .*Plan\.batched"):
        transformer(tokens, **inputs)


@torch.no_grad()
def call_with_lists():
    """Run Z-Image on captions of two lengths, with and without a ControlNet's samples."""
    model, computed = MODELS["z-image"], []
    transformer, inputs = model.build(), model.inputs(2, 6, 10)
    width = inputs["cap_feats"][0].shape[-1]
    inputs["cap_feats"] = [torch.linspace(-1, 1, n * width).view(n, width) for n in (5, 70)]
    transformer.layers[0].register_forward_hook(lambda *args: computed.append(args[-1]))
    alone = transformer(**inputs).sample
    more = {**inputs, "controlnet_block_samples": {0: torch.full_like(computed[0], 0.1)}}
    alone += transformer(**more).sample
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 1, batch=2))
    outs = [*transformer(**inputs).sample, *transformer(**more).sample]
    assert [len(x) for x in computed] == [2, 2, 1, 2]
    assert max(relative_error(*pair) for pair in zip(outs, alone, strict=True)) < 1e-5
    two_sizes = [inputs["x"][0], inputs["x"][1][..., :4]]
    for arguments in ({**inputs, "x": two_sizes}, {key: value[:1] for key, value in inputs.items()}):
        with pytest.warns(ParallelWarning, match="compute all samples"):
            transformer(**arguments)


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of these tests only observe.
@pytest.mark.parametrize("job", [call_on_batch_mesh, call_with_lists])
def test_calls_on_a_batch_mesh_are_exact_or_raise_on_every_rank(rank_pool, job):
    rank_pool.run(job, 2)
