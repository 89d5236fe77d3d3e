"""Fields of dataclasses are read and replaced, and the original stays as it was."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest

from para_core.dataclass_fields import by_path, change_field, fields_of, has_fields, leaves_of, map_leaves


@dataclass(frozen=True)
class Frozen:
    x: Any
    inner: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    inner: Any = None


@dataclass
class Derived:
    x: Any
    inner: Any = None
    size: int = field(init=False)

    def __post_init__(self):
        self.size, self.note = 3 * self.x, "own"


Named = namedtuple("Named", ["x", "inner"])
KINDS = [Frozen, Slotted, Derived, Named]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_nested_field_is_replaced_in_a_copy(kind, outer):
    value = outer(1, kind(2, None))
    changed = change_field(value, "inner.x", lambda x: x + 10)
    assert type(changed) is outer
    assert (changed.x, changed.inner.x) == (1, 12)
    assert value.inner.x == 2


def test_fields_that_depend_on_others_stay():
    changed = change_field(Derived(1), "x", lambda x: 5)
    assert (changed.x, changed.size, changed.note) == (5, 3, "own")


def test_dict_entry_is_replaced_by_path():
    value = {"video": Frozen(1, {"time": 2})}
    assert change_field(value, "video.inner.time", lambda x: 7) == {"video": Frozen(1, {"time": 7})}


def test_none_on_the_path_stays_none():
    assert change_field(Frozen(1), "inner.x", lambda x: 7) == Frozen(1)


@pytest.mark.parametrize("value", [Frozen(1, 2), {"x": 1}, 5])
def test_unknown_field_raises(value):
    with pytest.raises(TypeError, match="'other'"):
        change_field(value, "other", lambda x: x)


def test_unset_field_is_left_out():
    value = Derived(1)
    del value.size
    assert fields_of(value) == {"x": 1, "inner": None}


def test_leaves_are_found_at_any_depth():
    value = [Frozen(1, [Slotted(2, {"a": 3})]), (4, Named(5, None))]
    assert leaves_of(value) == [1, 2, 3, 4, 5, None]
    assert leaves_of(map_leaves(lambda x: x and 10 * x, value)) == [10, 20, 30, 40, 50, None]
    assert by_path({"video": Frozen(1, Slotted(2)), "n": 3}) == {
        "video.x": 1,
        "video.inner.x": 2,
        "video.inner.inner": None,
        "n": 3,
    }
    assert not has_fields(Frozen)
