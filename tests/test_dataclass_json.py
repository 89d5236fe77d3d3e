"""Dataclasses as JSON: what is written is read again, and what is not of the class is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from para_core.attention.attention_options import AttnOptions
from para_core.attention.block_sparse import read_block_mask
from para_core.attention.schedule import KeptKeys
from para_core.dataclass_json import from_json, to_json


@dataclass(frozen=True)
class Record:
    name: str
    options: AttnOptions
    inner: Record | None
    dtype: torch.dtype | None = None


MASK = read_block_mask(torch.tensor([[True, False], [False, True]]), (4, 3))
VALUES = [
    AttnOptions(),
    AttnOptions(rotate_method="2d", backend="triton-int8"),
    AttnOptions(comm_dtype=torch.float8_e4m3fn, kept_keys=KeptKeys(1 / 3, 7)),
    AttnOptions(block_mask=MASK),
    Record('a "name"\n', AttnOptions(block_mask=MASK), Record("", AttnOptions(), None, torch.bfloat16)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_is_read_again(value):
    assert from_json(type(value), to_json(value)) == value
    assert from_json(type(value), json.dumps(json.loads(to_json(value)))) == value


@pytest.mark.parametrize(
    "text",
    [
        "1|2",
        "x",
        "5",
        "null",
        "[]",
        "{}",
        '{"share": 0.5}',
        '{"share": 0.5, "window": 3, "other": 1}',
        '{"share": 2, "window": 3}',
    ],
)
def test_text_of_another_class_is_refused(text):
    with pytest.raises(ValueError):
        from_json(KeptKeys, text)


def test_tensor_cannot_be_written():
    with pytest.raises(TypeError, match="Tensor"):
        to_json(Record("a", AttnOptions(), torch.zeros(1)))


def test_dynamo_traces_the_writing():
    @torch.compile(backend="eager", fullgraph=True)
    def scale(x):
        options = AttnOptions(comm_dtype=torch.int8, kept_keys=KeptKeys(0.5))
        return x * len(to_json(options))

    expected = len(to_json(AttnOptions(comm_dtype=torch.int8, kept_keys=KeptKeys(0.5))))
    assert scale(torch.ones(1)).item() == expected
