"""Models and calls that no recipe covers. Each raises an error on every rank, or check_parallel reports it."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from para_core import Segment, SequenceLayout, UnifiedAttnMode, check_parallel
from tests.outside import official
from tests.outside.inputs import build, inputs_of, noise
from tests.outside.recipes import HUNYUAN_PLAN, planned
from tests.rank_pool import RankPoolError
from tests.tiny import cpu_mesh
from zoo.tiny.base import fill


def error_on_every_rank(rank_pool, function, *arguments):
    with pytest.raises(RankPoolError) as raised:
        rank_pool.run(function, 2, *arguments)
    assert raised.value.errors.keys() == {0, 1}
    return raised.value.errors[0]


def between_layers(first, last, model, *inputs, **kwargs):
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(2, 1)) as cp:
        model.get_submodule(first).register_forward_pre_hook(lambda _, args: (cp.shard(args[0], dim=1), *args[1:]))
        model.get_submodule(last).register_forward_hook(lambda _, args, x: cp.gather(x, dim=1))
        return model(*inputs, **kwargs)


def t5():
    small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 64}
    model = fill(transformers.T5EncoderModel(transformers.T5Config(**small)), seed=1)
    between_layers("encoder.block.0", "encoder.block.1", model, inputs_of("Llama")["input_ids"])


def test_t5_makes_its_bias_from_local_lengths_and_raises(rank_pool):
    error = error_on_every_rank(rank_pool, t5)
    assert isinstance(error, ValueError)
    assert "19, 19" in str(error) or "18, 18" in str(error)


def hunyuan_as_it_is():
    with torch.no_grad():
        planned(build("HunyuanVideo"), inputs_of("HunyuanVideo"), cpu_mesh(2, 1), HUNYUAN_PLAN)


def test_hunyuan_with_lengths_of_all_tokens_raises(rank_pool):
    error_on_every_rank(rank_pool, hunyuan_as_it_is)


class BySoftmax(nn.Module):
    """The attention of vit-pytorch, and of timm without fused attention."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(official.WIDTH, 3 * official.WIDTH)

    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in official.heads(self.to_qkv(x)))
        weights = (q @ k.mT * official.HEAD_DIM**-0.5).softmax(-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


def by_softmax():
    model = fill(nn.Sequential(BySoftmax(), BySoftmax()), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        between_layers("0", "1", model, noise(2, 31, official.WIDTH))


def test_softmax_by_hand_is_reported(rank_pool):
    error = error_on_every_rank(rank_pool, by_softmax)
    assert "scaled_dot_product_attention" in str(error)
    model = fill(nn.Sequential(BySoftmax(), BySoftmax()), seed=1)
    assert not check_parallel(model, noise(2, 31, official.WIDTH), dim=1)


def test_text_as_long_as_the_image_raises():
    """Check that lengths which could belong to either of two sequences raise: the mode does not guess."""
    inputs = {**inputs_of("FLUX"), "txt": noise(2, 35, 20), "txt_ids": torch.zeros(2, 35, 3)}
    tokens = ("img", "img_ids", "txt", "txt_ids")

    def forward(cp, model, **inputs):
        sharded = {name: cp.shard(x, dim=1) if name in tokens else x for name, x in inputs.items()}
        return cp.gather(model(**sharded), dim=1, sequence=cp.sequence(inputs["img"].shape[1]))

    check = check_parallel(build("FLUX"), forward=forward, ranks=2, **inputs)
    assert not check
    assert all("ValueError" in case.failure for case in check.cases)


def test_window_as_long_as_rank_part_is_reported():
    ids = inputs_of("Mistral, sliding window")["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    check = check_parallel(build("Mistral, sliding window"), input_ids=ids, position_ids=positions, dim=1)
    assert check.error > 0.1
    assert "layers.0.self_attn" in str(check)
    assert "24" in str(check.first_difference)


def decode_alone(model, ids):
    rows = []
    for _ in range(4):
        rows.append(model(ids, use_cache=False).logits[:, -1:])
        ids = torch.cat([ids, rows[-1].argmax(-1)], dim=1)
    return torch.cat(rows, dim=1)


class Decoding(nn.Module):
    def __init__(self, window):
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = transformers.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=64, sliding_window=window)
        self.decoder = transformers.MistralForCausalLM(config)

    def forward(self, ids):
        return decode_alone(self.decoder, ids)


@pytest.mark.parametrize(("window", "exact"), [(64, True), (24, False)])
def test_decoding_past_a_window_in_the_mode_is_reported(window, exact):
    """Check that check_parallel reports a window in the mode, because each rank's cache drops keys by its own number of
    keys.
    """

    def forward(cp, model, ids):
        total, ranks = ids.shape[1], len(cp.sequence(ids.shape[1]).sizes())
        prompt, cache = Segment("prompt", total), transformers.DynamicCache(config=model.decoder.config)
        positions = torch.arange(total + 4)[None]
        out = model.decoder(cp.shard(ids, dim=1), position_ids=cp.shard(positions[:, :total], dim=1), cache=cache)
        rows = [cp.gather(out.logits, dim=1)[:, -1:]]
        for step in range(1, 4):
            token = SequenceLayout((Segment("token", 1, replicated=True),), ranks)
            keys = SequenceLayout((prompt, Segment("answer", step, replicated=True)), ranks)
            with cp.using(token, key_layout=keys):
                position = positions[:, total + step - 1 : total + step]
                rows.append(model.decoder(rows[-1].argmax(-1), position_ids=position, cache=cache).logits)
        return torch.cat(rows, dim=1)

    model = fill(Decoding(window), seed=1)
    ids = torch.randint(3, 64, (2, 36), generator=torch.Generator().manual_seed(1))
    assert check_parallel(model, ids, forward=forward, ranks=2).exact == exact
