"""Models and calls that no recipe covers. Each raises an error on every rank, or check_parallel reports it."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from para_core import check_parallel
from tests.outside import official
from tests.outside.inputs import build, inputs_of
from tests.outside.recipes import between
from tests.rank_pool import RankPoolError
from tests.tiny import cpu_mesh
from zoo.tiny.base import fill, noise


def error_on_every_rank(rank_pool, function, *arguments):
    with pytest.raises(RankPoolError) as raised:
        rank_pool.run(function, 2, *arguments)
    assert raised.value.errors.keys() == {0, 1}
    return raised.value.errors[0]


def t5():
    small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 64}
    model = fill(transformers.T5EncoderModel(transformers.T5Config(**small)), seed=1)
    between("encoder.block.0", "encoder.block.1")(model, inputs_of("Qwen3"), cpu_mesh(2, 1))


def test_t5_makes_its_bias_from_local_lengths_and_raises(rank_pool):
    error = error_on_every_rank(rank_pool, t5)
    assert isinstance(error, ValueError)
    assert "19, 19" in str(error) or "18, 18" in str(error)


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
        between("0", "1")(model, {"input": noise(2, 31, official.WIDTH)}, cpu_mesh(2, 1))


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
