"""Fields of dataclasses: read, replaced in a copy, written as JSON and read again."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch
from diffusers.models.controlnets.controlnet_flux import FluxControlNetOutput

from para_core.attention.kept_keys import KeptKeys
from para_core.dataclass_fields import by_path, change_field, fields_of, has_fields, leaf_kinds, leaves_of, map_leaves
from para_core.dataclass_json import from_json, to_json

Frozen = make_dataclass("Frozen", ["x", ("inner", Any, None)], frozen=True)
Slotted = make_dataclass("Slotted", ["x", ("inner", Any, None)], frozen=True, slots=True)
Named = namedtuple("Named", ["x", "inner"])


@dataclass
class Derived:
    x: Any
    inner: Any = None
    size: int = field(init=False)

    def __post_init__(self):
        self.size, self.note = 3 * self.x, "own"


@dataclass(init=False)
class Output(dict):
    x: Any = None


KINDS = [Frozen, Slotted, Derived, Named]


@pytest.mark.parametrize(("outer", "kind"), list(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)))
def test_nested_field_is_replaced_in_a_copy(outer, kind):
    value = outer(1, kind(2, None))
    changed = change_field(value, "inner.x", lambda x: x + 10)
    assert type(changed) is outer
    assert (changed.x, changed.inner.x) == (1, 12)
    assert value.inner.x == 2


def test_fields_by_path():
    changed = change_field(Derived(1), "x", lambda x: 5)
    assert (changed.x, changed.size, changed.note) == (5, 3, "own")  # Fields that depend on others stay.
    value = {"video": Frozen(1, {"time": 2})}
    assert change_field(value, "video.inner.time", lambda x: 7) == {"video": Frozen(1, {"time": 7})}
    assert change_field(Frozen(1), "inner.x", lambda x: 7) == Frozen(1)
    none = FluxControlNetOutput(None, 2)
    assert change_field(none, "controlnet_block_samples", abs)["controlnet_block_samples"] is None
    for other in (Frozen(1, 2), {"x": 1, 0: 2}, 5):
        with pytest.raises(TypeError, match="'other'"):
            change_field(other, "other", lambda x: x)
    unset = Derived(1)
    del unset.size
    assert fields_of(unset) == {"x": 1, "inner": None}
    assert not has_fields(Frozen)


def test_leaves_are_found_at_any_depth():
    value = [Frozen(1, [Slotted(2, {"a": 3})]), (4, Named(5, None)), FluxControlNetOutput(None, Frozen(6, 7))]
    assert leaves_of(value) == [1, 2, 3, 4, 5, None, 6, 7]
    assert leaves_of(map_leaves(lambda x: x and 10 * x, value)) == [10, 20, 30, 40, 50, None, 60, 70]
    value = FluxControlNetOutput(controlnet_block_samples=[1], controlnet_single_block_samples=None)
    value["added"] = Output(x=2)  # an entry that is no field, of a class that is no pytree
    assert leaves_of(map_leaves(lambda x: 10 * x, value)) == [10, 20]
    assert leaf_kinds([Frozen(torch.ones(2), True), {"scale": 0.5}, "a"]) == (((2,), torch.float32), True, float, "a")
    paths = by_path({"video": Frozen(1, Slotted(2)), "n": 3})
    assert paths == {"video.x": 1, "video.inner.x": 2, "video.inner.inner": None, "n": 3}


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
    others: list[torch.dtype] | None = None


RECORD = Record('a "name"\n', Share(0.5, 7), Record("", Share(0.1, 1), None, torch.bfloat16))
OTHERS = ["1|2", "x", "5", "null", "[]", "{}", '{"share": 0.5}', '{"share": 2, "window": 3}']


def test_value_is_read_again_and_other_texts_are_refused():
    for value in (Share(1 / 3, 7), Record("", None, None), RECORD):
        assert from_json(type(value), to_json(value)) == value
    assert from_json(Record, to_json(Record("", None, None, None, [torch.half]))).others == ["float16"]
    for text in (*OTHERS, '{"share": 0.5, "window": 3, "other": 1}'):
        with pytest.raises(ValueError):
            from_json(Share, text)
    for name in ("nonsense", "Tensor", 5, ["float32"]):
        text = json.dumps({"name": "a", "share": None, "inner": None, "dtype": name, "others": None})
        with pytest.raises(ValueError, match="is no dtype"):
            from_json(Record, text)
    assert to_json(KeptKeys(1)) == to_json(KeptKeys(1.0))
    with pytest.raises(TypeError, match="Tensor"):
        to_json(Record("a", Share(0.5, 1), torch.zeros(1)))
