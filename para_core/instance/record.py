"""One record of state per instance: which features are attached to it, and what runs in place of its methods.

To attach a feature is to fill its slot, to remove it is to empty the slot. A filled slot has, for each method
that the feature replaces, a function ``wrapper(call, instance, *args, **kwargs)``, in which ``call(instance,
*args, **kwargs)`` runs the next slot or the method itself. ``call`` and ``instance`` must be positional-only,
because the method may have parameters with these names. The slots of a method run in the order of
:class:`~para_core.instance.slots.Slot`.

The record is in the instance's ``__dict__``, and exists while a slot is filled. The methods find it there
through the private class of the instance (:mod:`para_core.instance.private_class`).

Features that run around methods of an instance call these functions, instead of replacing methods. Tests:
tests/instance/test_record.py, and tests/adapters/parallel/test_undo.py for :func:`restore_on_failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from para_core.instance.private_class import (
    RECORD,
    call_as_original,
    enter_private_class,
    leave_private_class,
    original_class,
)
from para_core.instance.slots import Slot

# A function ``wrapper(call, instance, /, *args, **kwargs)`` that runs around a method of the instance.
Wrapper = Callable[..., Any]
# A slot of one instance. The name is empty, unless several pipelines share a model and each fills the slot.
Key = tuple[Slot, str]
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Filling:
    """The content of a slot of one instance, which a feature has put there.

    Args:
        methods: The functions that run around the methods of the instance, by method.
        owner: The object of the feature, which :func:`slot_owner` returns.
        permits_copies: Whether ``copy`` and ``pickle`` may make an instance without this filling.
    """

    methods: Mapping[str, Wrapper]
    owner: object = None
    permits_copies: bool = False


# The filled slots of an instance without a record. Nobody may change it.
_NOTHING: Mapping[Key, Filling] = {}


@dataclass(eq=False)
class InstanceRecord:
    """The filled slots of one instance, and what runs in place of its methods, which is composed when slots change."""

    # By slot, in the order in which they were filled first. Never changed in place: a change puts a new
    # mapping here, so that code may keep an earlier one to restore it, or compare the two by identity.
    fillings: Mapping[Key, Filling] = field(default_factory=dict)
    # By method, the functions of all slots, nested around the method.
    chains: dict[str, Wrapper] = field(default_factory=dict)
    # In place of __call__ if the module was compiled in place; None if slots replace other methods too, or if
    # the instance is no module. The private class then runs the chain of __call__ around the compiled code.
    compiled_call: Wrapper | None = None

    def compose(self, instance: Any, fillings: Mapping[Key, Filling]) -> None:
        """Make ``fillings`` the filled slots, and nest their functions around the methods of ``instance``.

        To be called after every change of the original class of ``instance``, too. The record stays as it was
        if this raises ``AttributeError``: the class lacks one of the methods.
        """
        base = original_class(instance)
        # A sort is stable, so among fillings of one slot the one that was filled last is outermost. To fill a
        # filled slot again keeps its place.
        innermost_first = sorted(fillings, key=lambda key: -key[0])
        chains: dict[str, Wrapper] = {}
        # The same functions, around the call of a module that was compiled in place. It is only used if all
        # of them run around __call__.
        compiled: Wrapper = partial(call_as_original, base)
        for key in innermost_first:
            for method, wrapper in fillings[key].methods.items():
                # partial() adds no Python frame between the functions.
                chains[method] = partial(wrapper, chains.get(method) or getattr(base, method))
                compiled = partial(wrapper, compiled)
        self.fillings = fillings
        self.chains = chains
        self.compiled_call = None
        if [*chains] == ["__call__"] and issubclass(base, nn.Module):
            self.compiled_call = compiled


def fill_slot(
    instance: Any,
    slot: Slot,
    methods: Mapping[str, Wrapper],
    *,
    owner: object = None,
    name: str = "",
    permits_copies: bool = False,
) -> None:
    """Fill ``slot`` of this one instance: calls of its ``methods`` then run these functions. Not thread-safe.

    If the slot is filled already, the methods are added to it, in place of earlier ones of the same name, and
    it keeps its place among fillings of the same slot. Its ``permits_copies`` is that of this call.

    Args:
        methods: ``wrapper(call, instance, *args, **kwargs)`` by the name of the method that it runs around.
        owner: The object that :func:`slot_owner` returns. Defaults to the earlier one.
        name: The name of one of several fillings of the slot.
        permits_copies: Whether ``copy`` and ``pickle`` may make an instance without this filling. By default
            they raise ``TypeError``.

    Raises:
        TypeError: The instance cannot have attributes, or no class can be derived from its class.
        AttributeError: The class of the instance lacks one of the methods. The slot stays as it was.
    """
    if not hasattr(instance, "__dict__"):
        raise TypeError(
            f"a {type(instance).__name__} has no attributes of its own (its class has only __slots__), so para_core "
            "cannot keep its state on it. Give the class a __dict__: leave __slots__ out of it or of a subclass."
        )
    fillings = dict(filled_slots(instance))
    earlier = fillings.get((slot, name), Filling({}))
    if owner is None:
        owner = earlier.owner
    all_methods = {**earlier.methods, **methods}
    fillings[slot, name] = replace(earlier, methods=all_methods, owner=owner, permits_copies=permits_copies)
    _set_fillings(instance, fillings)


def fill_slots(
    instances: Iterable[Any], slot: Slot, methods: Mapping[str, Wrapper], *, owner: object = None
) -> None:
    """Call :func:`fill_slot` for each of ``instances``, which then share graphs if their classes are equal."""
    for instance in instances:
        fill_slot(instance, slot, methods, owner=owner)


def empty_slot(instance: Any, slot: Slot, name: str = "") -> None:
    """Empty ``slot`` of ``instance``, if it is filled.
    The last one that is emptied restores the instance's class.
    """
    fillings = filled_slots(instance)
    if (slot, name) in fillings:
        _set_fillings(instance, {key: filling for key, filling in fillings.items() if key != (slot, name)})


def empty_slots(instances: Iterable[Any], *slots: Slot) -> None:
    """Call :func:`empty_slot` for each of ``instances`` and ``slots``."""
    # A model has over a thousand modules, most of which have no record.
    for instance in instances:
        if RECORD in instance.__dict__:
            for slot in slots:
                empty_slot(instance, slot)


def is_filled(instance: Any, slot: Slot, name: str = "") -> bool:
    """Whether ``slot`` of ``instance`` is filled."""
    return (slot, name) in filled_slots(instance)


def filled_slots(instance: Any) -> Mapping[Key, Filling]:
    """Return the filled slots of ``instance``."""
    record: InstanceRecord | None = getattr(instance, "__dict__", {}).get(RECORD)
    if record is None:
        return _NOTHING
    return record.fillings


def slot_owner(instance: Any, slot: Slot, kind: type[Owner], name: str = "") -> Owner | None:
    """Return the object of the feature that fills ``slot`` of ``instance``; None if it is empty, or of
    another ``kind``. Dynamo can trace this function.
    """
    record: InstanceRecord | None = getattr(instance, "__dict__", {}).get(RECORD)
    if record is None or (slot, name) not in record.fillings:
        return None
    owner = record.fillings[slot, name].owner
    if isinstance(owner, kind):
        return owner
    return None


@contextmanager
def fill_during(
    instance: Any, slot: Slot, methods: Mapping[str, Wrapper], *, owner: object = None
) -> Iterator[None]:
    """Fill ``slot`` by :func:`fill_slot` inside the ``with`` block.

    What happens after the block depends on the slot before it:

    - It was empty: it stays filled, so that graphs stay valid that were compiled for the class of
      ``instance``. Its functions also run after the block, until the caller empties the slot.
    - It was filled with equal methods, and by ``owner`` if one is given: the block changes nothing, and
      nothing is restored.
    - It was filled otherwise: the earlier filling is restored, with its owner.
    """
    earlier = filled_slots(instance).get((slot, ""))
    if earlier is None:
        fill_slot(instance, slot, methods, owner=owner)
    has_other_owner = earlier is not None and owner is not None and earlier.owner is not owner
    if earlier is None or (earlier.methods == methods and not has_other_owner):
        yield
        return
    fill_slot(instance, slot, methods, owner=owner)
    try:
        yield
    finally:
        # Not by fill_slot(), which would keep a method that only the block has added.
        _set_fillings(instance, {**filled_slots(instance), (slot, ""): earlier})


@contextmanager
def restore_on_failure(instances: Iterable[Any]) -> Iterator[None]:
    """Restore the slots of ``instances``, and therefore their classes, if the ``with`` block raises.

    Instances that are not in the list, such as modules that the block adds, are not restored.
    """
    before = _fillings_of(instances)
    try:
        yield
    except BaseException:
        for instance, fillings in before:
            if filled_slots(instance) is not fillings:
                _set_fillings(instance, fillings)
        raise


@contextmanager
def empty_during(instances: Iterable[Any], keep: Collection[Slot] = ()) -> Iterator[None]:
    """Empty the slots of ``instances`` inside the ``with`` block, except those of ``keep``, and fill them
    again afterwards. What the block fills or empties is lost, also on an instance without a record before it.

    Code such as FSDP2, which derives a new class from an instance's class, must run inside the block, so that
    it does not derive it from the private class. The slots are then those of the new class.
    """
    before = _fillings_of(instances)
    try:
        for instance, fillings in before:
            kept = {key: filling for key, filling in fillings.items() if key[0] in keep}
            if len(kept) < len(fillings):
                _set_fillings(instance, kept)
        yield
    finally:
        for instance, fillings in before:
            # Most modules have no record before and after, and need no call.
            if fillings or RECORD in instance.__dict__:
                _set_fillings(instance, fillings)


def _fillings_of(instances: Iterable[Any]) -> list[tuple[Any, Mapping[Key, Filling]]]:
    """Return each of ``instances`` with its filled slots."""
    # A model has over a thousand modules, so there is no Python call for each.
    fillings_of: list[tuple[Any, Mapping[Key, Filling]]] = []
    for instance in instances:
        fillings = _NOTHING
        record = instance.__dict__.get(RECORD)
        if record is not None:
            fillings = record.fillings
        fillings_of.append((instance, fillings))
    return fillings_of


def _set_fillings(instance: Any, fillings: Mapping[Key, Filling]) -> None:
    """Make ``fillings`` the filled slots of ``instance``; without any, remove the record and the private class."""
    if not fillings:
        leave_private_class(instance)
        instance.__dict__.pop(RECORD, None)
        return
    record = instance.__dict__.get(RECORD) or InstanceRecord()
    record.compose(instance, dict(fillings))
    # Before the record is stored: a class may refuse to be derived from, and then the slots stay empty.
    enter_private_class(instance, record.chains)
    instance.__dict__[RECORD] = record
