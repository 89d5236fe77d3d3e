"""Ranks along a batch mesh dim get their samples of every tensor, or an error names the tensor."""

import inspect
import re
from dataclasses import replace

import diffusers
import pytest
import torch
from torch import Tensor

from para_core.adapters import parallelize_transformer
from para_core.adapters.models import ADAPTERS
from para_core.plans.samples import holds_tensor
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.transformers.registry import MODELS

BATCHED = [adapter for adapter in ADAPTERS if adapter.plan is not None and adapter.plan.batched]
# A parameter that is annotated with only these types holds no tensor.
PLAIN = r"(int|float|bool|str|None|list|tuple|typing|Union|Optional|class|[\[\],|<>'. ])+"


@pytest.mark.parametrize("adapter", BATCHED, ids=lambda adapter: adapter.transformer)
def test_tensor_parameters_are_batched_or_declared_common(adapter):
    parameters = inspect.signature(getattr(diffusers, adapter.transformer).forward).parameters
    may_hold = {name for name, p in parameters.items() if not re.fullmatch(PLAIN, str(p.annotation))}
    may_hold -= {"self", "return_dict"}
    declared = {*adapter.plan.batched, *adapter.plan.common, *adapter.plan.unshared, *adapter.plan.refused}
    assert may_hold <= declared <= set(parameters)


def test_the_tensors_of_every_tiny_model_are_among_them():
    for name, model in MODELS.items():
        for adapter in BATCHED:
            if adapter.transformer == model.cls:
                names = {key for key, value in model.inputs(3, 6, 10).items() if holds_tensor(value)}
                assert names <= {*adapter.plan.batched, *adapter.plan.common, *adapter.plan.unshared}, name


SD3 = next(adapter for adapter in BATCHED if adapter.transformer == "SD3Transformer2DModel")


def call_with_more():
    """Return the error or the output of each way to call."""
    model = MODELS["sd3"]
    transformer, inputs = parallelize_transformer(model.build(), mesh=cpu_mesh(1, 1, batch=2)), model.inputs(3, 6, 10)
    tokens = inputs.pop("hidden_states")

    def attempt(*args, **kwargs):
        try:
            return transformer(*args, **kwargs).sample
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    results = {
        "positional": attempt(tokens, **inputs),
        "unknown": attempt(tokens, **inputs, guidance=3.0),
        "doubled": attempt(tokens, **inputs, hidden_states=tokens),
        "too many": attempt(tokens, *inputs.values(), *[None] * 5),
        "no tokens": attempt(**inputs),
    }
    plan = replace(SD3.plan, batched={"hidden_states": 0, "timestep": 0})
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 1, batch=2), adapter=replace(SD3, plan=plan))
    return {**results, "undeclared": attempt(tokens, **inputs)}


def test_bad_arguments_raise_on_every_rank_of_batch_mesh(rank_pool):
    model = MODELS["sd3"]
    with torch.no_grad():
        expected = model.build()(**model.inputs(3, 6, 10)).sample
    for results in rank_pool.run(call_with_more, 2):
        assert relative_error(results.pop("positional"), expected) < 1e-5
        assert not any(isinstance(value, Tensor) for value in results.values()), results
        assert "'guidance'" in results["unknown"]
        assert re.search(r"multiple .*'hidden_states'", results["doubled"])
        assert "positional" in results["too many"]
        assert re.search(r"missing .*'hidden_states'", results["no tokens"])
        assert re.search(r"encoder_hidden_states, pooled_projections .*Plan\.batched", results["undeclared"])


def call_with_lists():
    """Run Z-Image on captions of two lengths, with and without a ControlNet's samples. Return the latents, and the
    number of samples that this rank computed.
    """
    model, computed = MODELS["z-image"], []
    transformer, inputs = model.build(), model.inputs(2, 6, 10)
    width = inputs["cap_feats"][0].shape[-1]
    inputs["cap_feats"] = [torch.linspace(-1, 1, n * width).view(n, width) for n in (5, 70)]
    tokens = []
    transformer.layers[0].register_forward_hook(lambda *args: tokens.append(args[-1]) or computed.append(len(args[-1])))
    outs = [transformer(**inputs).sample]
    more = {0: torch.full_like(tokens[0], 0.1)}
    outs.append(transformer(**inputs, controlnet_block_samples=more).sample)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 1, batch=2))
    outs.append(transformer(**inputs).sample)
    outs.append(transformer(**inputs, controlnet_block_samples=more).sample)
    return outs, computed


def test_lists_per_sample_are_distributed(rank_pool):
    for (alone, controlled, shared, whole), computed in rank_pool.run(call_with_lists, 2):
        assert computed == [2, 2, 1, 2]
        for out, expected in [*zip(shared, alone, strict=True), *zip(whole, controlled, strict=True)]:
            assert relative_error(out, expected) < 1e-5
