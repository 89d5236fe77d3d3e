"""Hugging Face transformers in the mode: which of a model's own masks and flags it sees, and which messages follow."""

import logging

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
)
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from para_core import Segment, SequenceLayout, UnifiedAttnMode, init_context_parallel_mesh
from tests.attention.one_device import relative_error

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}
DECODERS = {
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama, one layer": lambda: LlamaModel(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, num_key_value_heads=2)),
    "mistral": lambda: MistralModel(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    "qwen2": lambda: Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=4)),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_implementation="sdpa")),
}


def make(name):
    torch.manual_seed(3)
    return DECODERS[name]().eval()


def make_encoder():
    torch.manual_seed(3)
    return BertModel(BertConfig(**SIZES), add_pooling_layer=False).eval()


def make_ids(S, B=2):
    return torch.randint(64, (B, S), generator=torch.Generator().manual_seed(S))


def padding(kind, S, B=2):
    mask = torch.ones(B, S, dtype=torch.long)
    if kind == "right":
        mask[1, S - 3 :] = 0
    if kind == "left":
        mask[1, :3] = 0
    if kind == "left, more than a rank's part":
        mask[:, : S // 2 + 1] = 0
    return mask


def mesh_of(kind):
    world_size = dist.get_world_size()
    return init_context_parallel_mesh("cpu", max_ring_dim_size=world_size if kind == "ring" else 1)


def outcome(function):
    """Return the result of ``function``, or the text of its error."""
    try:
        return function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def run_parallel(mesh, model, ids, mask, dtype=None, balance=None, **kwargs):
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        positions = cp.shard(torch.arange(ids.shape[1])[None], dim=1, balance=balance)
        local = cp.shard(ids, dim=1, balance=balance)
        mask = mask(cp, local) if callable(mask) else mask
        out = model(local, attention_mask=mask, position_ids=positions, use_cache=False, **kwargs).last_hidden_state
        tokens = cp.sequence(ids.shape[1], balance=balance)
        return cp.gather(out, dim=1, sequence=tokens)


# -- A mask that a decoder builds from its local length.


def decoders_with_a_whole_mask(kind, name, lengths, paddings):
    mesh, model = mesh_of(kind), make(name)
    return [
        outcome(lambda S=S, pads=pads: run_parallel(mesh, model, make_ids(S), padding(pads, S)))
        for S in lengths
        for pads in paddings
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gpt2"])
def test_causal_mask_of_local_length_is_refused(rank_pool, kind, name):
    paddings = ["none", "right", "left", "left, more than a rank's part"]
    for outs in rank_pool.run(decoders_with_a_whole_mask, 2, kind, name, [16, 13], paddings):
        assert all(isinstance(out, str) and out.startswith("ValueError") for out in outs), outs
        assert all("cp.shard" in out and "propose_plan" in out and "4-D" in out for out in outs), outs


def decoders_with_a_sharded_mask(kind, name, lengths, paddings):
    """Return the outcomes with a 4-D mask over all tokens: sharded by rows, computed from sharded rows, with all rows,
    and cut by each rank itself.
    """
    mesh, model, outs = mesh_of(kind), make(name), []
    for S in lengths:
        for pads in paddings:
            for additive in (False, True):
                whole = four_dims(padding(pads, S), additive, window=4 if name == "mistral" else S)
                first = 0 if dist.get_rank() == 0 else (S + 1) // 2
                for mask in (
                    lambda cp, _, whole=whole: cp.shard(whole, dim=-2),
                    lambda cp, _, whole=whole: cp.shard(whole, dim=-2).clone()[:, :1].contiguous(),
                    lambda cp, _, whole=whole: whole,
                    lambda _, local, whole=whole, first=first: whole[:, :, first : first + local.shape[1]].clone(),
                ):
                    outs.append(outcome(lambda S=S, mask=mask: run_parallel(mesh, model, make_ids(S), mask)))
    return outs


def four_dims(pads, additive, window):
    S = pads.shape[1]
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    mask = (j <= i) & (j > i - window) & pads[:, None, None].bool()
    mask = mask | (i == j)  # With the diagonal, no row is without a key.
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_four_dimensional_mask_sharded_by_rows_is_exact(rank_pool, kind, name):
    lengths, paddings = [16, 13], ["right", "left"]
    model, expected = make(name), []
    for S in lengths:
        for pads in paddings:
            for additive in (False, True):
                whole = four_dims(padding(pads, S), additive, window=4 if name == "mistral" else S)
                with torch.no_grad():
                    out = model(make_ids(S), attention_mask=whole, use_cache=False).last_hidden_state
                    expected += [out, out, out, None]
    for outs in rank_pool.run(decoders_with_a_sharded_mask, 2, kind, name, lengths, paddings):
        for out, whole in zip(outs, expected, strict=True):
            if whole is None:
                assert out.startswith("ValueError") and "cp.shard(mask, dim=-2)" in out
            else:
                assert relative_error(out, whole) < 1e-5


# -- A key mask that is expanded over rows.


def encoders_with_padding(kind, lengths):
    mesh, model, outs = mesh_of(kind), make_encoder(), []
    for S in lengths:
        pads = padding("right", S)
        for mask in (pads, lambda cp, _, pads=pads: cp.shard(pads, dim=1)):
            with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
                positions = cp.shard(torch.arange(S)[None], dim=1)
                local = cp.shard(make_ids(S), dim=1)
                attention_mask = mask(cp, local) if callable(mask) else mask
                out = model(local, attention_mask=attention_mask, position_ids=positions).last_hidden_state
                outs.append(cp.gather(out, dim=1))
    return outs


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_an_encoder_takes_its_padding_mask_whole_and_sharded(rank_pool, kind):
    lengths, model, expected = [16, 13, 7], make_encoder(), []
    with torch.no_grad():
        for S in lengths:
            expected += [model(make_ids(S), attention_mask=padding("right", S)).last_hidden_state] * 2
    for outs in rank_pool.run(encoders_with_padding, 2, kind, lengths):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5


def make_windowed_encoder():
    torch.manual_seed(3)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertModel(ModernBertConfig(**SIZES, **ids, local_attention=8, global_attn_every_n_layers=2)).eval()


def windowed_encoders(kind, lengths):
    mesh, model = mesh_of(kind), make_windowed_encoder()
    return [
        outcome(lambda S=S: run_parallel(mesh, encoder_without_cache(model), make_ids(S), padding("right", S)))
        for S in lengths
    ]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_window_to_both_sides_of_local_length_is_refused(rank_pool, kind):
    for outs in rank_pool.run(windowed_encoders, 2, kind, [16, 13, 9]):
        assert all(isinstance(out, str) and out.startswith("ValueError") and "cp.shard" in out for out in outs), outs


# -- Ranks with a single token.


def single_tokens(kind, lengths):
    mesh, encoder, decoder, outs = mesh_of(kind), encoder_without_cache(make_encoder()), make("llama"), []
    for S in lengths:
        outs += [outcome(lambda S=S, model=model: run_parallel(mesh, model, make_ids(S), None))
                 for model in (encoder, decoder)]  # fmt: skip
    return outs


def encoder_without_cache(encoder):
    return lambda ids, attention_mask, position_ids, use_cache: encoder(ids, attention_mask, position_ids=position_ids)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_encoder_of_single_tokens_is_exact_and_decoder_is_reported(rank_pool, kind):
    lengths, encoder = [3, 2], make_encoder()
    with torch.no_grad():
        expected = [encoder(make_ids(S)).last_hidden_state for S in lengths]
    for outs, warned in rank_pool.run(with_warnings, 2, single_tokens, kind, lengths):
        assert "is_causal" in outs[1] and outs[1].startswith("ValueError")  # The ranks pass different flags.
        for out, whole in zip(outs[::2], expected, strict=True):
            assert relative_error(out, whole) < 1e-5
        # If each rank has one token, the call does not tell whether the model is causal.
        assert len(warned) == 2 and all("at most one of 2 tokens" in text and "propose_plan" in text for text in warned)


def with_warnings(function, *args):
    """Return the result of ``function(*args)``, and the warnings that para_core logs meanwhile."""
    caught, handler = [], logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())
    logging.getLogger("para_core").addHandler(handler)
    try:
        return function(*args), caught
    finally:
        logging.getLogger("para_core").removeHandler(handler)


# -- Inputs that were never sharded.


def unsharded_encoder(mesh):
    with torch.no_grad(), UnifiedAttnMode(mesh):
        return make_encoder()(make_ids(8)).last_hidden_state


def halves_of_a_decoder(mesh, **options):
    """Take this rank's half without the mode."""
    ids, positions = (x.chunk(2, dim=1)[dist.get_rank()] for x in (make_ids(8), torch.arange(8)[None]))
    with torch.no_grad(), UnifiedAttnMode(mesh, **options):
        return make("llama")(ids, position_ids=positions, use_cache=False).last_hidden_state


def unsharded_models():
    mesh = mesh_of("ulysses")
    layout = SequenceLayout((Segment("x", 8),), 2)
    return (
        with_warnings(unsharded_encoder, mesh),
        with_warnings(halves_of_a_decoder, mesh),
        with_warnings(lambda: halves_of_a_decoder(mesh, layout=layout)),
    )


def test_inputs_that_the_mode_did_not_shard_are_reported_once(rank_pool):
    with torch.no_grad():
        encoded, decoded = (model(make_ids(8)).last_hidden_state for model in (make_encoder(), make("llama")))
    for rank, outs in enumerate(rank_pool.run(unsharded_models, 2)):
        half = decoded.chunk(2, dim=1)[rank]
        for (out, warned), expected, times in zip(outs, (encoded, half, half), (1, 1, 0), strict=True):
            assert relative_error(out, expected) < 1e-5
            assert len(warned) == times and all("cp.shard" in text and "layout=" in text for text in warned)


# -- Decoding with a cache of keys and values.


def decode(kind, name, S, steps):
    mesh, model, outs = mesh_of(kind), make(name), []
    ids, ranks = make_ids(S + steps), dist.get_world_size()
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        positions = cp.shard(torch.arange(S)[None], dim=1)
        prompt = model(cp.shard(ids[:, :S], dim=1), position_ids=positions, use_cache=True)
        outs.append(cp.gather(prompt.last_hidden_state, dim=1))
        for step in range(steps):
            # Every rank has the new token. Its keys are those of its part of the prompt, followed by those of all new
            # tokens.
            new = SequenceLayout((Segment("new", 1, replicated=True),), ranks)
            keys = SequenceLayout((Segment("prompt", S), Segment("new", step + 1, replicated=True)), ranks)
            with cp.using(new, key_layout=keys):
                token = model(
                    ids[:, S + step : S + step + 1],
                    position_ids=torch.tensor([[S + step]]),
                    cache=prompt.cache,
                    use_cache=True,
                )
            outs.append(token.last_hidden_state)
    return torch.cat(outs, dim=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_decoding_with_a_cache_is_exact(rank_pool, kind, name):
    S, steps = 9, 3
    with torch.no_grad():
        expected = make(name)(make_ids(S + steps), use_cache=False).last_hidden_state
    for out in rank_pool.run(decode, 2, kind, name, S, steps):
        assert relative_error(out, expected) < 1e-5


# -- What a model does after a gather, and layouts that are not consecutive.


def balanced_and_gathered(kind, S):
    mesh, model = mesh_of(kind), make("llama")
    ones = lambda _, local: torch.ones_like(local)  # noqa: E731
    out = run_parallel(mesh, model, make_ids(S), ones, balance="causal")
    refused = outcome(lambda: run_parallel(mesh, model, make_ids(S), None, balance="causal"))
    causal_model = make_causal()
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        local, positions = cp.shard(make_ids(S), dim=1), cp.shard(torch.arange(S)[None], dim=1)
        hidden = causal_model.model(local, position_ids=positions, use_cache=False).last_hidden_state
        logits = causal_model.lm_head(cp.gather(hidden, dim=1))
        loss = causal_model.loss_function(logits, make_ids(S), vocab_size=64)
        flat = cp.gather(hidden, dim=1).view(-1, 32)
    return out, refused, loss, flat.shape


def make_causal():
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_balanced_decoder_and_a_loss_behind_a_gather(rank_pool, kind):
    S = 13
    with torch.no_grad():
        expected = make("llama")(make_ids(S)).last_hidden_state
        loss = make_causal()(make_ids(S), labels=make_ids(S)).loss
    for out, refused, own_loss, shape in rank_pool.run(balanced_and_gathered, 2, kind, S):
        assert relative_error(out, expected) < 1e-5
        # Positions that jump look like packed sequences, so the model builds a mask of them, but not on the rank whose
        # positions are consecutive.
        assert refused.startswith("ValueError")
        assert "attn_mask" in refused
        assert "attention_mask of ones" in refused
        assert relative_error(own_loss, loss) < 1e-5
        assert shape == (2 * S, 32)


# -- In a graph.


def compiled_decoder(lengths):
    mode, model, outs = UnifiedAttnMode(mesh_of("ulysses")), make("llama, one layer"), []

    def call(ids, positions, mask):
        with mode:
            tokens = mode.sequence(ids.shape[1])
            local, own = (mode.shard(x, dim=1, sequence=tokens) for x in (ids, positions))
            rows = None if mask is None else mode.shard(mask, dim=-2, sequence=tokens)
            hidden = model(local, attention_mask=rows, position_ids=own, use_cache=False).last_hidden_state
            return mode.gather(hidden, dim=1, sequence=tokens)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.no_grad():
        for S in lengths:
            mask = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
            outs.append(compiled(make_ids(S), torch.arange(S)[None], mask))
        torch._dynamo.reset()
        refused = outcome(
            lambda: torch.compile(call, fullgraph=True, backend="eager")(make_ids(8), torch.arange(8)[None], None)
        )
    return outs, refused


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[12], pytest.param([12, 15], marks=pytest.mark.long)])
def test_decoder_in_graph_takes_4d_mask(rank_pool, lengths):
    model = make("llama, one layer")
    with torch.no_grad():
        expected = [model(make_ids(S)).last_hidden_state for S in lengths]
    for outs, refused in rank_pool.run(compiled_decoder, 2, lengths):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5
        assert isinstance(refused, str)
        assert "4-D mask" in refused
