"""The values in the arguments of a model call, by path, whether they are equal in another call, and which of
them are timesteps.

:mod:`.branches` and :mod:`.branch_search` tell CFG branches apart by these. Values that are wrongly taken for
equal would add the residuals of another branch; equal ones that are taken for different only let a step be
computed. So what is not known counts as different. A graph has :mod:`.call_digest` instead. Tests:
tests/cache/test_steps.py.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from para_core.torch_internals import version_of

# Arguments with these names hold the position in the denoising schedule, so they change from step to step.
# ``timestep_r`` is where a step of a mean-flow model ends.
_CLOCK = re.compile(r"(.*_)?(t|times?|timesteps?|sigmas?|noise_levels?)(_r)?")
# A tensor with the timestep that has more elements is compared on the device; a smaller one is read by the
# host.
MOST_READ = 1 << 16
# Larger tensors, in bytes, such as residuals of a ControlNet, are not kept alive to compare them with a later
# call.
_MAX_KEPT_BYTES = 1 << 20
# Bounds of the search in nested arguments. A container that is nested more deeply, or with whose entries a
# call would have more values, is compared by identity, so a change inside it is not noticed.
_MAX_DEPTH = 8
_MAX_LEAVES = 512
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    torch.dtype,
    torch.device,
    range,
    slice,
    type,
)
# The most frequent types of arguments that are not tensors; a subset of _PLAIN.
_SCALARS = frozenset({bool, int, float, str})
_PLAIN_TENSORS = (Tensor, nn.Parameter)
# The kinds of NumPy's dtypes of real numbers: bools, integers with and without sign, and floats.
_REAL_KINDS = "biuf"


@dataclass(slots=True)
class ReadValues:
    """The values that a NumPy array, or a tensor with the timestep, held at the moment of a call.

    Args:
        content: What is compared.
        largest: The largest element; None if there is none, or the elements are no real numbers.
    """

    content: tuple[Any, ...]
    largest: float | None = field(compare=False)


class Leaf(NamedTuple):
    """A tensor or another value inside an argument of a call.

    Args:
        reference: A tuple that contains the value, or for a large tensor a weak reference, so that it is not
            kept alive. A large tensor that is gone counts as another one.
        is_tensor: Whether it is a tensor.
        is_plain: Whether it is a tensor or parameter, of no other subclass.
        version: The version counter of the tensor in that call; None if it has none.
    """

    reference: Any
    is_tensor: bool = False
    is_plain: bool = False
    version: int | None = None

    def compare(self, other: Leaf) -> bool | None:
        """Return whether the values are equal; None if two tensors must be compared by value to know.

        Tensors that were changed in place since their call count as different, because their earlier values
        are gone. A tensor without a version counter, as in inference mode, counts as unchanged: callers that
        must know ask :attr:`has_version` first.
        """
        x = self.value
        y = other.value
        if not (self.is_tensor and other.is_tensor):
            return self.is_tensor == other.is_tensor and _are_same(x, y)
        if x is None or y is None:
            return False
        if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
            return False
        if not (self.is_plain and other.is_plain):
            if x is y:
                return True
            return None
        if x is y or x.is_meta or _memory_of(x) == _memory_of(y):
            return (self.version or 0) == (other.version or 0)
        if self._is_changed() or other._is_changed():
            return False
        return None

    @property
    def value(self) -> Any:
        """The value; None if it was a large tensor that is gone."""
        if isinstance(self.reference, tuple):
            return self.reference[0]
        return self.reference()

    @property
    def is_kept_tensor(self) -> bool:
        """Whether the value is a plain tensor that still exists."""
        return self.is_plain and self.value is not None

    @property
    def has_version(self) -> bool:
        """Whether the value is a tensor that counts its changes."""
        return self.version is not None

    def _is_changed(self) -> bool:
        return self.version is not None and version_of(self.value) != self.version


def tensor_leaf(value: Tensor, *, keep: bool) -> Leaf:
    """Return the leaf of a tensor. A large one is not kept alive, unless ``keep`` is set."""
    reference: Any = (value,)
    if not keep and value.nbytes > _MAX_KEPT_BYTES:
        reference = ref(value)
    is_plain = type(value) in _PLAIN_TENSORS
    version = None
    if is_plain and not value.is_inference():
        version = version_of(value)
    return Leaf(reference, is_tensor=True, is_plain=is_plain, version=version)


def leaf_of(value: Any) -> Leaf:
    """Return the leaf of one value, which is kept alive if it is a tensor."""
    if isinstance(value, Tensor):
        return tensor_leaf(value, keep=True)
    return Leaf((value,))


# The leaves of the arguments of one call, by their path, such as ``joint_attention_kwargs['scale']``.
Leaves = dict[str, Leaf]


def _are_same(x: Any, y: Any) -> bool:
    """Whether two values that are no tensors are equal. A float NaN equals NaN, and objects of other classes,
    among them containers beyond the bounds, only themselves.
    """
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, float) and x != x:
        return bool(y != y)
    return isinstance(x, (*_PLAIN, ReadValues, frozenset)) and bool(x == y)


def _memory_of(x: Tensor) -> tuple[Any, ...]:
    """Return what two views of the same elements have in common, if they have the same shape."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.stride()


def argument_leaves(arguments: Mapping[str, Any]) -> Leaves:
    """Return all values in ``arguments``.
    Containers are taken apart, so a change inside one is noticed later.
    """
    leaves: Leaves = {}
    for name, value in arguments.items():
        # Most arguments are small tensors and numbers. This saves Python calls for each.
        if value is None or type(value) in _SCALARS:
            leaves[name] = Leaf((value,))
        elif type(value) is Tensor and value.nbytes <= _MAX_KEPT_BYTES and not value.is_inference():
            leaves[name] = Leaf((value,), is_tensor=True, is_plain=True, version=version_of(value))
        elif type(value) is dict and not value:
            leaves[name] = Leaf((dict,))
        else:
            _add_leaves(leaves, name, value, ())
    return leaves


def _add_leaves(leaves: Leaves, path: str, value: Any, outer: tuple[int, ...]) -> None:
    """Add the values in ``value``, which is at ``path``, to ``leaves``.

    ``outer`` are the ids of the containers around it, to end at one that contains itself.
    """
    if isinstance(value, Tensor):
        leaves[path] = tensor_leaf(value, keep=False)
        return
    if isinstance(value, _PLAIN):
        leaves[path] = Leaf((value,))
        return
    if isinstance(value, (set, frozenset)):
        leaves[path] = Leaf((frozenset(value),))
        return
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
        # This is a NumPy array or number. The bytes of an array of objects are addresses, which may be used
        # again: _items_of takes it apart.
        largest = None
        if value.size > 0 and value.dtype.kind in _REAL_KINDS:
            largest = float(value.max())
        leaves[path] = Leaf((ReadValues((str(value.dtype), value.shape, value.tobytes()), largest),))
        return
    inner = None
    if id(value) not in outer and len(outer) != _MAX_DEPTH:
        inner = _items_of(value)
    if inner is None or len(leaves) + len(inner) > _MAX_LEAVES:
        leaves[path] = Leaf((value,))
        return
    leaves[path] = Leaf((type(value),))
    for key, item in inner.items():
        _add_leaves(leaves, f"{path}{key}", item, (*outer, id(value)))


def _items_of(value: Any) -> dict[str, Any] | None:
    """Return the values inside a container, function or object, by the end of their path; None if it is one value."""
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            items[f"[{key!r}]"] = item
        return items
    if isinstance(value, (list, tuple)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if hasattr(value, "dtype") and hasattr(value, "flat"):
        return {".shape": value.shape, **{f"[{index}]": item for index, item in enumerate(value.flat)}}
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, types.FunctionType):
        # A function that is defined again has the same code; what it refers to may differ. One that refers to
        # itself would never equal its earlier definition.
        cells = {path: content for path, content in _cells_of(value) if content is not value}
        own = {f".{name}": item for name, item in value.__dict__.items()}
        return {
            ".__code__": value.__code__,
            ".__defaults__": value.__defaults__,
            ".__kwdefaults__": value.__kwdefaults__,
            **cells,
            **own,
        }
    attributes = getattr(value, "__dict__", None)
    if is_dataclass(value):
        # One with slots has no __dict__; another may have attributes that are no fields.
        of_fields = {each.name: getattr(value, each.name, None) for each in fields(value)}
        attributes = {**of_fields, **(attributes or {})}
    elif isinstance(value, (nn.Module, torch.Generator, types.CodeType, types.ModuleType)):
        return None
    if not isinstance(attributes, dict):
        return None
    return {f".{name}": item for name, item in attributes.items()}


def _cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the closure of ``function``, by the end of their path."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".__closure__[{name!r}]", cell.cell_contents
        except ValueError:
            # The variable has no value yet.
            yield f".__closure__[{name!r}]", None


def argument_of(path: str) -> str:
    """Return the name of the argument that contains the value at ``path``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def is_clock(name: str) -> bool:
    """Whether an argument with this ``name`` holds the position in the denoising schedule."""
    return _CLOCK.fullmatch(name) is not None


def clocks_in(leaves: Leaves) -> set[str]:
    """Return the paths of the timestep: of all values in arguments with such a name or, if there is none, in
    fields and entries with such a name of other arguments.
    """
    clocks = set(filter(_is_clock_argument, leaves))
    return clocks or set(filter(_is_clock_field, leaves))


@functools.lru_cache(maxsize=4096)
def _is_clock_argument(path: str) -> bool:
    return is_clock(argument_of(path))


@functools.lru_cache(maxsize=4096)
def _is_clock_field(path: str) -> bool:
    return any(is_clock(part.strip("]'")) for part in re.split(r"[.\[]", path)[1:])


def condition_of(arguments: Mapping[str, Any], condition: str) -> Any:
    """Return the argument, or the field of an argument, that an entry of ``CachedBlocks.conditions`` names,
    such as ``"video.text"``; None if the call has none. Unlike paths of :data:`Leaves`, it names no entries.

    Raises:
        TypeError: The argument has no such field.
    """
    name, *field_names = condition.split(".")
    value = arguments.get(name)
    for field_name in field_names:
        if value is None:
            return None
        if not hasattr(value, field_name):
            raise TypeError(
                f"CachedBlocks(conditions=...) names {condition!r}; a {type(value).__name__} has no {field_name!r}."
            )
        value = getattr(value, field_name)
    return value
