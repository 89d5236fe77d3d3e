"""Hugging Face transformers in the mode: which of a model's own masks and flags it sees, and which messages follow.

tests/outside has caches and training, all exact.
"""

import re

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
)

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import relative_error
from tests.modes.outcomes import logged, outcome
from tests.tiny import cpu_mesh

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODELS = {
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: MistralModel(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, **IDS, local_attention=8, global_attn_every_n_layers=2)
    ),
}


def call(name, ids, attention_mask=None, position_ids=None):
    torch.manual_seed(3)
    model, options = MODELS[name]().eval(), {} if "bert" in name else {"use_cache": False}
    return model(ids, attention_mask=attention_mask, position_ids=position_ids, **options).last_hidden_state


def make_ids(S, B=2):
    return torch.randint(64, (B, S), generator=torch.Generator().manual_seed(S))


def padding(kind, S, B=2):
    mask = torch.ones(B, S, dtype=torch.long)
    if kind == "right":
        mask[1, S - 4 :] = 0
    if kind == "left":
        mask[1, :3] = 0
    if kind == "left, more than a rank's part":
        mask[:, : S // 2 + 1] = 0
    return mask


def four_dims(kind, S, *, additive=False, window=None):
    pads, window = padding(kind, S), window or S
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    mask = (j <= i) & (j > i - window) & pads[:, None, None].bool()
    mask = mask | (i == j)  # With the diagonal, no row is without a key.
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask


def own_rows(cp, whole, S):
    """Return this rank's rows, which it takes without the mode."""
    first = 0 if dist.get_rank() == 0 else (S + 1) // 2
    return whole[:, :, first : first + cp.sequence(S).size(dist.get_rank())].clone()


# How a mask over all tokens reaches the model, and the words of the error if it is refused.
WAYS = {
    "whole": (lambda cp, mask: mask, None),
    "keys sharded": (lambda cp, mask: cp.shard(mask, dim=1), None),
    "rows sharded": (lambda cp, mask: cp.shard(mask, dim=-2), None),
    "computed from rows": (lambda cp, mask: cp.shard(mask, dim=-2).clone()[:, :1].contiguous(), None),
    "rows cut by hand": (lambda cp, mask: own_rows(cp, mask, mask.shape[-1]), r"cp\.shard\(mask, dim=-2\)"),
}
# The model, the number of tokens, the way of the mask, the mask, and the words of the error if the model is refused.
CAUSAL, ROWS = r"cp\.shard.*propose_plan", ("rows sharded", "computed from rows", "whole", "rows cut by hand")
CASES = [(name, 13, "whole", padding("none", 13), CAUSAL) for name in ("llama", "mistral", "gpt2")]
CASES += [
    ("llama", S, "whole", padding(pads, S), CAUSAL)
    for S in (16, 13)
    for pads in ("right", "left", "left, more than a rank's part")
]
CASES += [("llama", 16, way, four_dims("left", 16, additive=True), None) for way in ROWS]
CASES += [("mistral", 13, way, four_dims("right", 13, window=4), None) for way in ROWS]
CASES += [("bert", S, way, padding("right", S), None) for S in (16, 7) for way in ("whole", "keys sharded")]
CASES += [("modernbert", S, "whole", padding("right", S), r"cp\.shard") for S in (16, 9)]


def run_parallel(mesh, case):
    name, S, way, mask, _ = case
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        positions, ids = cp.shard(torch.arange(S)[None], dim=1), cp.shard(make_ids(S), dim=1)
        return cp.gather(call(name, ids, WAYS[way][0](cp, mask), positions), dim=1, sequence=cp.sequence(S))


def run_cases(ring, ulysses):
    mesh = cpu_mesh(ring, ulysses)
    return [outcome(lambda case=case: run_parallel(mesh, case)) for case in CASES]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_masks_of_models_are_exact_or_refused(rank_pool, ring, ulysses):
    results = rank_pool.run(run_cases, 2, ring, ulysses)
    for index, (name, S, way, mask, refused) in enumerate(CASES):
        words = refused or WAYS[way][1]
        for out in (outs[index] for outs in results):
            if words is not None:
                assert isinstance(out, str) and re.match(f"ValueError: (?s:.*){words}", out), (name, S, way, out)
                continue
            with torch.no_grad():
                expected = call(name, make_ids(S), mask)
            assert relative_error(out, expected) < 1e-5, (name, S, way)


# -- What is logged.


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
        with_warnings(run_parallel, mesh, ("llama", 3, "whole", None, None)),
        with_warnings(run_parallel, mesh, ("bert", 2, "whole", None, None)),
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
