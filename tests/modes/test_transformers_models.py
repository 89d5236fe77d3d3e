"""Hugging Face transformers in the mode: messages about inputs. tests/outside has exact and refused models."""

import re

import torch
import torch.distributed as dist
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import relative_error
from tests.modes.outcomes import logged, outcome
from tests.tiny import cpu_mesh

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "bert": lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
}


def call(name, ids, position_ids=None):
    torch.manual_seed(3)
    model, options = MODELS[name]().eval(), {} if name == "bert" else {"use_cache": False}
    return model(ids, position_ids=position_ids, **options).last_hidden_state


def make_ids(S):
    return torch.randint(64, (2, S), generator=torch.Generator().manual_seed(S))


def run_parallel(mesh, name, S):
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        positions, ids = cp.shard(torch.arange(S)[None], dim=1), cp.shard(make_ids(S), dim=1)
        return cp.gather(call(name, ids, positions), dim=1, sequence=cp.sequence(S))


def with_warnings(function, *args, **options):
    """Return the result of ``function``, and the warnings that para_core logs meanwhile."""
    with logged("para_core") as caught:
        return outcome(lambda: function(*args, **options)), caught


def unsharded_encoder(mesh):
    with torch.no_grad(), UnifiedAttnMode(mesh):
        return call("bert", make_ids(8))


def halves_of_a_decoder(mesh, **options):
    """Return the output of a decoder for this rank's half, which the rank took without the mode."""
    ids, positions = (x.chunk(2, dim=1)[dist.get_rank()] for x in (make_ids(8), torch.arange(8)[None]))
    with torch.no_grad(), UnifiedAttnMode(mesh, **options):
        return call("llama", ids, position_ids=positions)


def models_that_are_reported():
    mesh, layout = cpu_mesh(1, 2), SequenceLayout((Segment("x", 8),), 2)
    return [
        with_warnings(unsharded_encoder, mesh),
        with_warnings(halves_of_a_decoder, mesh),
        with_warnings(halves_of_a_decoder, mesh, layout=layout),
        with_warnings(run_parallel, mesh, "llama", 3),
        with_warnings(run_parallel, mesh, "bert", 2),
    ]


def test_unsharded_inputs_and_single_tokens_are_reported_once(rank_pool):
    with torch.no_grad():
        encoded, decoded, two = (call(name, make_ids(S)) for name, S in (("bert", 8), ("llama", 8), ("bert", 2)))
    for rank, outs in enumerate(rank_pool.run(models_that_are_reported, 2)):
        half = decoded.chunk(2, dim=1)[rank]
        for (out, warned), expected, times in zip(outs, (encoded, half, half), (1, 1, 0), strict=False):
            assert relative_error(out, expected) < 1e-5
            assert len(warned) == times and all("cp.shard" in text and "layout=" in text for text in warned)
        (refused, _), (out, warned) = outs[3:]
        assert re.match("ValueError: .*is_causal", refused)  # The ranks pass different flags.
        assert relative_error(out, two) < 1e-5
        # If each rank has one token, the call does not tell whether the model is causal.
        assert len(warned) == 1 and re.search("at most one of 2 tokens.*propose_plan", warned[0])
