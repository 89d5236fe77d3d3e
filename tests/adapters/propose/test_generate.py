"""A decoder of transformers generates the same under a proposed plan as alone: every rank has the whole key-value
cache.
"""

import pytest
import torch
from torch import nn

from para_core.adapters import propose_plan
from para_core.comparison.virtual_ranks import first_error, outcomes_on_virtual_ranks, with_same_weights
from para_core.plans.region import apply_plan

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

MESHES = [(1, 2), (3, 1), (2, 2)]


def decoder(name, **config):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes, **heads, **config)
    )
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def tokens(length):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))


def plan_of(model):
    proposal = propose_plan(model, ({"input_ids": tokens(13)}, {"input_ids": tokens(23)}), segment="tokens")
    assert proposal.plan is not None, str(proposal)
    return proposal.plan


def on_ranks(model, plan, function, ring, ulysses):
    copies = [with_same_weights(model) for _ in range(ring * ulysses)]

    def run(mesh):
        apply_plan(copies[mesh.rank], plan, mesh)
        return function(copies[mesh.rank])

    return outcomes_on_virtual_ranks(run, ring=ring, ulysses=ulysses, device=torch.device("cpu"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@pytest.mark.parametrize(("name", "config"), [("Llama", {}), ("Mistral", {"sliding_window": 5})])
def test_tokens_are_those_of_one_device(name, config, ring, ulysses):
    model = decoder(name, **config)
    plan = plan_of(model)
    for length, options in ((11, {}), (1, {}), (12, {"num_beams": 2})):

        def generate(module, length=length, options=options):
            return module.generate(tokens(length), max_new_tokens=8, do_sample=False, **options)

        expected = generate(model)
        for outcome in on_ranks(model, plan, generate, ring, ulysses):
            assert outcome.error is None
            assert torch.equal(outcome.output, expected)


def in_chunks(model):
    cache, logits = None, []
    for start, stop in ((0, 7), (7, 12), (12, 13)):
        out = model(tokens(13)[:, start:stop], cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_chunks_of_a_prompt_see_those_before(name):
    model = decoder(name)
    plan = plan_of(model)
    with torch.no_grad():
        expected = model(tokens(13)).logits
    for outcome in on_ranks(model, plan, in_chunks, 1, 2):
        assert outcome.error is None
        assert (outcome.output - expected).norm() / expected.norm() < 1e-5


def test_a_cache_of_a_fixed_size_raises():
    model = decoder("Llama")

    def generate(module):
        return module.generate(tokens(11), max_new_tokens=4, cache_implementation="static", disable_compile=True)

    _, error = first_error(on_ranks(model, plan_of(model), generate, 1, 2))
    assert isinstance(error, ValueError)
    assert "use_cache=False" in str(error)
