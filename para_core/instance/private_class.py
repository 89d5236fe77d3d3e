"""The private class of instances that have a record: its methods run the slots of the instance.

Python looks up ``__call__`` on the class, so an instance with a record gets a private subclass with the same
name and module, as FSDP2 does. It is made once per class and kept, so a graph that was compiled for it stays
valid. It has no state: attributes, hooks and ``forward`` of the instance stay as they are, so offloading,
LoRA and other code can replace them at any time. ``instance.__class__`` is still the original class, and
assigning another class to it, as FSDP2 and parametrizations do, replaces the original and keeps the record. A
compiled instance is compiled again when its first slot is filled, because its type has changed. Exception:
the graph of a module that was compiled in place (``Module.compile``) is kept if slots replace only
``__call__``.

``copy`` and ``pickle`` rebuild an object from its class and attributes, so a copy would silently lose the
record, and run without para_core. Copying an instance with a record therefore raises ``TypeError``, unless
every slot permits copies that lack it.

Only :mod:`.record` gives an instance its private class and takes it away. Tests:
tests/instance/test_record.py and tests/adapters/test_one_instance.py.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from para_core.torch_internals import COMPILED_CALL, TracingContext

# The key of the record (:class:`~para_core.instance.record.InstanceRecord`) in the ``__dict__`` of an
# instance.
RECORD = "_para_core_record"

# The private class of each original class, by the original's id: a class may equal another one. A private
# class refers to its original, so the ids stay valid.
_PRIVATE_CLASSES: dict[int, type] = {}
# The descriptor by which Python itself reads and assigns ``__class__``. A private class hides it by a
# property.
_CLASS: Any = vars(object)["__class__"]


def original_class(instance: Any) -> type:
    """Return the class that ``instance`` had before a slot was filled."""
    base: type = vars(type(instance)).get("_para_core_original", type(instance))
    return base


def unwrapped_class(instance: Any) -> type:
    """Return the class of ``instance`` without the private subclass and without the subclass that FSDP2 derives."""
    return _without_fsdp(original_class(instance))


def _without_fsdp(cls: type) -> type:
    """Return the class from which FSDP2 has derived ``cls``; ``cls`` itself if FSDP2 did not make it."""
    for base in cls.__mro__:
        if not any(x.__module__.startswith("torch.distributed.fsdp") for x in (base, *base.__bases__)):
            return base
    return cls


def enter_private_class(instance: Any, methods: Iterable[str]) -> None:
    """Give ``instance`` the private class of its original class, in which ``methods`` run the record of an instance."""
    base = original_class(instance)
    private = _PRIVATE_CLASSES.get(id(base))
    if private is None:
        private = _make_private_class(base)
        _PRIVATE_CLASSES[id(base)] = private
    for method in methods:
        # A method stays in the class when the slot is emptied: it then calls that of the original class.
        if method not in vars(private):
            setattr(private, method, _entry(base, method))
    if type(instance) is not private:
        _CLASS.__set__(instance, private)


def leave_private_class(instance: Any) -> None:
    """Give ``instance`` its original class."""
    base = original_class(instance)
    if type(instance) is not base:
        _CLASS.__set__(instance, base)


def _shown_class(instance: Any) -> type:
    """Return the class that ``instance.__class__`` shows: the original, or the one whose methods Dynamo traces."""
    if TracingContext.try_get() is not None:
        return type(instance)
    return original_class(instance)


def _replace_original(instance: Any, cls: type) -> None:
    """Set the class from which the private class of ``instance`` is derived, for ``instance.__class__ = cls``."""
    record = instance.__dict__.get(RECORD)
    # A user may have kept the private class.
    _CLASS.__set__(instance, vars(cls).get("_para_core_original", cls))
    if record is not None:
        record.compose(instance, record.fillings)
        enter_private_class(instance, record.chains)


def _make_private_class(base: type) -> type:
    """Return a new private class of ``base``, without methods that run a record."""
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
        "__reduce_ex__": _reduce_as_original,
        "__dir__": _dir_as_original,
        # FSDP2 keeps a table of classes, derives a class from instance.__class__, and assigns that. If it saw
        # the private class, models without a record would get a class with it.
        "__class__": property(_shown_class, _replace_original),
        "_para_core_original": base,
        # The class in the user's or a library's source, by which classes are compared (:func:`_metaclass`).
        "_para_core_written": _without_fsdp(base),
    }
    private: type = _metaclass(type(base))(base.__name__, (base,), namespace)
    return private


@cache
def _metaclass(base: type) -> type:
    """Return a metaclass that makes a private class equal to the class it was derived from, with the same
    hash.

    This is needed because diffusers' ``from_pipe`` evaluates ``type(component) in (...)``, and users have
    dicts with classes as keys. While Dynamo traces, a class only equals itself: Dynamo resolves ``super()``
    by ``mro.index(cls)``, which would otherwise find the private class again, and recurse without end.
    """

    def is_equal(cls: Any, other: Any) -> Any:
        if not isinstance(other, type):
            return NotImplemented
        if TracingContext.try_get() is not None:
            return cls is other
        return vars(cls).get("_para_core_written", cls) is vars(other).get("_para_core_written", other)

    namespace = {
        "__eq__": is_equal,
        "__hash__": lambda cls: hash(vars(cls).get("_para_core_written") or id(cls)),
    }
    return type(base.__name__, (base,), namespace)


def is_entry(function: Any) -> bool:
    """Whether ``function`` is a method that :func:`enter_private_class` has put into a private class."""
    return hasattr(getattr(function, "__func__", function), "_para_core_entry")


def _entry(base: type, method: str) -> Callable[..., Any]:
    """Return the function that becomes ``method`` of the private class of ``base``. It runs the slots of the
    instance around the method of ``base``.

    It looks up the record in each call, because code such as Module.compile keeps this bound method while
    slots change, and the method of ``base``, because other code may replace it there.
    """
    is_call = method == "__call__"

    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = self.__dict__.get(RECORD)
        if record is None or method not in record.chains:
            return getattr(base, method)(self, *args, **kwargs)
        if is_call and not torch.compiler.is_compiling() and self.__dict__.get(COMPILED_CALL) is not None:
            return (record.compiled_call or record.chains[method])(self, *args, **kwargs)
        return record.chains[method](self, *args, **kwargs)

    original = getattr(base, method)
    entry: Any = enter
    entry.__name__ = method
    entry.__doc__ = original.__doc__
    # Set __wrapped__, so that inspect.signature returns the signature of the original method.
    entry.__wrapped__ = original
    entry._para_core_entry = True
    return entry  # type: ignore[no-any-return]


def call_as_original(base: type, /, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``module``, which was compiled in place, with its original class ``base``.

    Dynamo compiles once per class. With the original class, all blocks of a model share graphs even if only
    some of them have a record.
    """
    private = type(module)
    _CLASS.__set__(module, base)
    try:
        return base.__call__(module, *args, **kwargs)
    finally:
        if private is not base:
            _CLASS.__set__(module, private)


def _dir_as_original(self: Any) -> list[str]:
    base = original_class(self)
    added = {RECORD, *(name for name in vars(type(self)) if not hasattr(base, name))}
    return [name for name in super(type(self), self).__dir__() if name not in added]


def _reduce_as_original(self: Any, protocol: Any) -> Any:
    """Return the ``__reduce_ex__`` from which ``copy`` and ``pickle`` rebuild ``self`` with its original
    class.

    Raises:
        TypeError: The copy would lose a slot that does not permit copies without it.
    """
    record = self.__dict__.get(RECORD)
    fillings: Any = {}
    if record is not None:
        fillings = record.fillings
    lost = sorted({slot.label for (slot, _), filling in fillings.items() if not filling.permits_copies})
    if lost:
        raise TypeError(
            f"this {original_class(self).__name__} cannot be copied or pickled while para_core runs around it "
            f"({', '.join(lost)}): the copy would run without that, and differently on each rank. Undo it first "
            "(unparallelize_pipe(pipe), remove_cache_from_pipe(pipe), unparallelize_vae(vae)), "
            "make the copy, then apply it to both."
        )
    construct, arguments, *rest = super(type(self), self).__reduce_ex__(protocol)
    if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Use _reconstructor, which accepts any class, because pickle accepts __newobj__ only for the object's
        # own class.
        construct = copyreg._reconstructor  # type: ignore[attr-defined]
        arguments = (type(self), object, None)
    arguments = list(arguments)
    for index, argument in enumerate(arguments):
        if argument is type(self):
            arguments[index] = original_class(self)
    return (construct, tuple(arguments), *[_without_record(part) for part in rest])


def _without_record(state: Any) -> Any:
    """Return the ``state`` of a copy without the record: a dict of attributes, alone or in a tuple with slots."""
    if isinstance(state, dict) and RECORD in state:
        return {name: value for name, value in state.items() if name != RECORD}
    if isinstance(state, tuple):
        return tuple(_without_record(part) for part in state)
    return state
