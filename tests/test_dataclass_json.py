"""Dataclasses as JSON: what is written is read again, and what is not of the class is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from para_core.dataclass_json import from_json, to_json


@dataclass(frozen=True)
class Share:
    share: float
    window: int

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError("share is no part")


@dataclass(frozen=True)
class Record:
    name: str
    share: Share | None
    inner: Record | None
    dtype: torch.dtype | None = None


VALUES = [
    Share(1 / 3, 7),
    Record("", None, None),
    Record('a "name"\n', Share(0.5, 7), Record("", Share(0.1, 1), None, torch.bfloat16)),
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
        from_json(Share, text)


def test_tensor_cannot_be_written():
    with pytest.raises(TypeError, match="Tensor"):
        to_json(Record("a", Share(0.5, 1), torch.zeros(1)))


def test_dynamo_traces_the_writing():
    @torch.compile(backend="eager", fullgraph=True)
    def scale(x):
        options = Record("a", Share(0.5, 1), None, torch.int8)
        return x * len(to_json(options))

    expected = len(to_json(Record("a", Share(0.5, 1), None, torch.int8)))
    assert scale(torch.ones(1)).item() == expected
