"""Wrap methods of a single object, without affecting other objects of its class.

Python looks up ``__call__`` on the class, so a wrapped instance gets a private subclass with the same name and module.
The wrappers live in that class. Attributes, hooks and ``forward`` of the instance stay as they are, so offloading, LoRA
and other code can replace them at any time. ``instance.__class__`` is still the original class, and assigning another
class to it, as FSDP2 and parametrizations do, replaces the original and keeps the wrappers. A compiled instance is
compiled again, because its type has changed.
Exception: the graph of a module that was compiled in place (``Module.compile``) is kept if only ``__call__`` is
wrapped.

``copy`` and ``pickle`` rebuild an object from its class and attributes, so a copy would silently lose the wrappers, and
run without para_core. Copying a wrapped instance therefore raises ``TypeError``, unless every wrapper permits copies
that lack this wrapper (``plain_copies``).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, auto
from functools import cache, partial
from itertools import chain, repeat
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from para_core.torch_internals import COMPILED_CALL, ORIGINAL_CALLABLE, ORIGINAL_MODULE, SUBMODULES, TracingContext

# An Around is a wrapper. The call around(call, instance, *args, **kwargs) replaces the method, and inside it
# `call(instance, *args, **kwargs)` runs the next wrapper or the method. `call` and `instance` must be positional-only,
# because the method may have parameters with these names.
Around = Callable[..., Any]


class WrapperPriority(IntEnum):
    """The position of a wrapper among the wrappers of one method, from the outermost to the innermost.

    For wrappers with equal positions, the order in which they were added decides.
    """

    # The parallel call is outermost: before anything else, ranks check that they all make the same call.
    PARALLEL = auto()
    # CFG parallelism runs outside the cache, so that the cache sees only the CFG branches that this rank computes.
    GUIDANCE = auto()
    # A rank verifies the CFG branches that it computes, with everything inside that may change their result.
    VERIFIED = auto()
    # The cache identifies CFG branches from unsharded arguments, so it runs outside the plan.
    CACHE = auto()
    # Pipeline stages exchange gathered tensors, so they run outside the plan.
    STAGES = auto()
    PATCH = auto()
    PLAN = auto()
    # If a submodule returns all tokens, PipeFusion takes its patch of them inside the plan, before the plan shards the
    # output.
    PATCH_OUTPUTS = auto()
    # The cache compares the sharded outputs of blocks, so the cached block runs inside the plan.
    CACHED_BLOCK = auto()
    # Stages run inside the cache, because a block that the cache skips must not wait for another stage.
    STAGED_BLOCK = auto()
    # Offloading is innermost, so that weights are copied to the device only for a block that runs.
    OFFLOADED_BLOCK = auto()


# A private class has an attribute with this prefix for each wrapped method: the chain of its wrappers, which runs
# instead of the method. The attribute's name ends with the method's name.
_CHAIN = "_para_core_chain_"
# If a module was compiled in place, its private class has this attribute: the chain that runs instead of __call__.
_COMPILED_CHAIN = "_para_core_compiled_call"


def wrap_method(
    instance: Any, method: str, key: str, around: Around, *, order: WrapperPriority, plain_copies: bool = False
) -> None:
    """Wrap ``method`` of this one instance: a call of the method then calls ``around``. Not thread-safe.

    If the method already has a wrapper with this ``key``, that wrapper is replaced.

    Args:
        key: Name of the wrapper, for :func:`unwrap`.
        around: Called as ``around(call, instance, *args, **kwargs)``, where ``call(instance, *args, **kwargs)`` runs
            the next wrapper or the method.
        order: Position among the wrappers of the method. Among equal positions, the wrapper that was added last is
            outermost.
        plain_copies: Whether ``copy`` and ``pickle`` may make an instance without this wrapper. By default they raise
            ``TypeError``.
    """
    _set_wrappers(instance, {**_wrappers(instance), (key, method): (order, around, plain_copies)})


@contextmanager
def wrapped_during(instance: Any, method: str, key: str, around: Around, *, order: WrapperPriority) -> Iterator[None]:
    """Wrap ``method`` by ``around`` inside the ``with`` block, then restore the earlier wrapper with this ``key``.

    If there was none, ``around`` stays, so that graphs stay valid that were compiled for the class of ``instance``.
    """
    earlier = wrapper(instance, method, key)
    if earlier != around:
        wrap_method(instance, method, key, around, order=order)
    try:
        yield
    finally:
        if earlier is not None and earlier != around:
            wrap_method(instance, method, key, earlier, order=order)


def wrap_alike(instances: Iterable[Any], method: str, key: str, around: Around, *, order: WrapperPriority) -> None:
    """Call :func:`wrap_method` for each of ``instances``. Those of equal class then share graphs."""
    for instance in instances:
        wrap_method(instance, method, key, around, order=order)


def unwrap(instance: Any, key: str) -> None:
    """Remove the wrappers with ``key`` from ``instance``. If no other wrapper is left, restore its original class."""
    # If there is nothing to remove, keep the class, because graphs were compiled for it.
    if is_wrapped(instance, key):
        _set_wrappers(instance, {name: around for name, around in _wrappers(instance).items() if name[0] != key})


def is_wrapped(instance: Any, key: str) -> bool:
    """Whether ``instance`` has a wrapper with ``key``."""
    return any(name[0] == key for name in _wrappers(instance))


def only_wrapped_by(instance: Any, *keys: str) -> bool:
    """Whether ``instance`` has wrappers, all of them with one of ``keys``."""
    wrapped_by = {name[0] for name in _wrappers(instance)}
    return bool(wrapped_by) and wrapped_by <= {*keys}


def wrapper(instance: Any, method: str, key: str) -> Around | None:
    """Return the wrapper of ``method`` with ``key``; None if there is none."""
    return _wrappers(instance).get((key, method), (None, None, None))[1]


def instances_in(instance: Any) -> list[Any]:
    """Return ``instance``, the modules among its attributes, and all modules inside these modules, each once."""
    parts = [instance] if isinstance(instance, nn.Module) else getattr(instance, "__dict__", {}).values()
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    return list({id(x): x for x in (instance, *modules)}.values())


@contextmanager
def restored_on_failure(instances: Iterable[Any]) -> Iterator[None]:
    """Restore the wrappers of ``instances``, and therefore their classes, if the ``with`` block raises."""
    # The list refers to the private classes, because restoring wrappers gives the same classes only while these exist.
    before = [(instance, type(instance), _wrappers(instance)) for instance in instances]
    try:
        yield
    except BaseException:
        for instance, _, wrappers in before:
            _set_wrappers(instance, wrappers)
        raise


def original_class(instance: Any) -> type:
    """Return the class that ``instance`` had before it was wrapped."""
    base: type = vars(type(instance)).get("_para_core_original", type(instance))
    return base


def unwrapped_class(instance: Any) -> type:
    """Return the class of ``instance`` without wrappers and without the subclass that FSDP2 derives."""
    return _without_fsdp(original_class(instance))


def _without_fsdp(cls: type) -> type:
    """Return the class from which FSDP2 has derived ``cls``; ``cls`` itself if FSDP2 did not make it."""
    parents = {base: (base, *base.__bases__) for base in cls.__mro__}
    return next(
        base for base in parents if not any(x.__module__.startswith("torch.distributed.fsdp") for x in parents[base])
    )


@contextmanager
def unwrapped(instances: Iterable[Any]) -> Iterator[None]:
    """Remove all wrappers of ``instances`` inside the ``with`` block, and add them again afterwards.

    Code such as FSDP2, which derives a new class from an instance's class, must run inside the block, so that it does
    not derive it from the private class. The wrappers are then added to the new class.
    """
    wrappers_of = [(instance, _wrappers(instance)) for instance in instances]
    try:
        for instance, _ in wrappers_of:
            _set_wrappers(instance, {})
        yield
    finally:
        for instance, wrappers in wrappers_of:
            _set_wrappers(instance, wrappers)


@contextmanager
def with_wrappers(instances: Iterable[Any], keep: Callable[[str, WrapperPriority], bool]) -> Iterator[None]:
    """Remove the wrappers of ``instances`` inside the ``with`` block, except those that ``keep(key, position)`` names,
    and add them again afterwards.
    """
    # The list refers to the private classes, because restoring wrappers gives the same classes only while these exist.
    before = [(instance, type(instance), _wrappers(instance)) for instance in instances]
    try:
        for instance, _, wrappers in before:
            kept = {name: entry for name, entry in wrappers.items() if keep(name[0], entry[0])}
            if len(kept) < len(wrappers):
                _set_wrappers(instance, kept)
        yield
    finally:
        for instance, _, wrappers in before:
            _set_wrappers(instance, wrappers)


def uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped to make ``module``; ``module`` itself if it was not made so."""
    return getattr(module, ORIGINAL_MODULE, module)


def is_compiled(module: Any) -> bool:
    """Whether ``module`` itself was compiled by ``torch.compile(module)``, ``module.compile()`` or
    ``module.forward = torch.compile(module.forward)``.
    """
    state = module.__dict__
    if state.get(COMPILED_CALL) is not None or ORIGINAL_MODULE in state[SUBMODULES]:
        return True
    return "forward" in state and hasattr(state["forward"], ORIGINAL_CALLABLE)


def has_compiled_parts(module: Any) -> bool:
    """Whether ``module`` or a module inside it was compiled."""
    return ModuleTree(module).has_compiled_parts()


def submodules_of(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` and all modules inside it, parents first. A module that two parents share is listed twice."""
    modules: list[nn.Module] = [module]
    # The loop appends to the list that it iterates over, without a Python call per module, unlike module.modules().
    for submodule in modules:
        children = submodule.__dict__[SUBMODULES].values()
        modules.extend(children if None not in children else [child for child in children if child is not None])
    return modules


class ModuleTree:
    """A snapshot of ``module`` and all modules inside it, which can detect changes at every call of the model.

    A model has over a thousand modules, so the checks are loops in C, without a Python call per module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._states = [submodule.__dict__ for submodule in submodules_of(module)]
        self._child_dicts = [state[SUBMODULES] for state in self._states]
        self._children = self._children_now()
        self._holds_compiled_module = any(map(dict.__contains__, self._child_dicts, repeat(ORIGINAL_MODULE)))

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._child_dicts)))

    def is_unchanged(self) -> bool:
        """Whether every module still has the same submodules as in the snapshot."""
        return self._children_now() == self._children

    def has_compiled_parts(self) -> bool:
        """Whether the module or a module inside it is compiled now. Only valid if :meth:`is_unchanged`."""
        if self._holds_compiled_module or any(map(dict.get, self._states, repeat(COMPILED_CALL))):
            return True
        if not any(map(dict.__contains__, self._states, repeat("forward"))):
            return False
        return any(hasattr(state.get("forward"), ORIGINAL_CALLABLE) for state in self._states)


# Wrappers maps (key of a wrapper, method) to (position, wrapper, whether copies without this wrapper are permitted).
Wrappers = Mapping[tuple[str, str], tuple[WrapperPriority, Around, bool]]


def _wrappers(instance: Any) -> Wrappers:
    # Do not use vars(type(instance)), because Dynamo, which also traces this function, cannot trace vars().
    wrappers: Wrappers = getattr(type(instance), "_para_core_wrappers", {})
    return wrappers


def _set_wrappers(instance: Any, wrappers: Wrappers) -> None:
    base = original_class(instance)
    if not wrappers:
        if type(instance) is not base:
            _set_class(instance, base)
        return
    # The key includes the order in which wrappers were added, because this order decides among equal positions.
    key = id(base), *[(name, order, id(around), plain) for name, (order, around, plain) in wrappers.items()]
    private = _CLASSES.get(key) or _class_of(base, wrappers)
    _CLASSES[key] = private
    _set_class(instance, private)


# The descriptor by which Python itself reads and assigns ``__class__``. A private class hides it by a property.
_CLASS: Any = vars(object)["__class__"]


def _set_class(instance: Any, cls: type) -> None:
    _CLASS.__set__(instance, cls)


def _class_seen(instance: Any) -> type:
    """Return the class that ``instance.__class__`` shows: the original, or the one whose methods Dynamo traces."""
    return type(instance) if TracingContext.try_get() is not None else original_class(instance)


def _replace_original(instance: Any, cls: type) -> None:
    """Set the class from which the private class of ``instance`` is derived, for ``instance.__class__ = cls``."""
    wrappers = _wrappers(instance)
    _set_class(instance, cls)
    if "_para_core_wrappers" not in vars(cls):
        _set_wrappers(instance, wrappers)


# Instances with equal wrappers share a private class as long as it exists. The class refers to its base and its
# wrappers, so the ids in the key of its entry stay valid.
_CLASSES: WeakValueDictionary[Any, type] = WeakValueDictionary()


def _class_of(base: type, wrappers: Wrappers) -> type:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
        "__reduce_ex__": _reduce_as_original,
        "__dir__": _dir_as_original,
        # FSDP2 keeps a table of classes, derives a class from instance.__class__, and assigns that. If it saw the
        # private class, which equals the original, models of the class would get each other's wrappers, or lose them.
        "__class__": property(_class_seen, _replace_original),
        "_para_core_original": base,
        "_para_core_written": _without_fsdp(base),
        "_para_core_wrappers": wrappers,
    }
    innermost_first = sorted(wrappers.items(), key=lambda item: -item[1][0])
    for (_, method), (_, around, _) in innermost_first:
        chain = _CHAIN + method
        # Chain the wrappers by partial(), because it adds no Python frame between them.
        namespace[chain] = partial(around, namespace.get(chain) or getattr(base, method))
        namespace[method] = _entry(method, getattr(base, method))
    if issubclass(base, nn.Module) and all(method == "__call__" for _, method in wrappers):
        call: Callable[..., Any] = partial(_call_as_original, base)
        for _, (_, around, _) in innermost_first:
            call = partial(around, call)
        namespace[_COMPILED_CHAIN] = call
        namespace["__call__"] = _entry("__call__", base.__call__, compiled_in_place=True)
    private: type = _metaclass(type(base))(base.__name__, (base,), namespace)
    return private


def _call_as_original(base: type, /, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``module``, which was compiled in place, with its original class. The module's innermost wrapper calls this.

    Dynamo compiles once per class. With the original class, all blocks of a model share graphs even if their wrappers
    differ.
    """
    private = type(module)
    _set_class(module, base)
    try:
        return base.__call__(module, *args, **kwargs)
    finally:
        if private is not base:
            _set_class(module, private)


@cache
def _metaclass(base: type) -> type:
    """Return a metaclass that makes a private class equal to the class it was derived from, with the same hash.

    This is needed because diffusers' ``from_pipe`` evaluates ``type(component) in (...)``, and users have dicts with
    classes as keys. While Dynamo traces, a class only equals itself: Dynamo resolves ``super()`` by ``mro.index(cls)``,
    which would otherwise find the private class again, and recurse without end.
    """

    def same(cls: Any, other: Any) -> bool:
        if TracingContext.try_get() is not None:
            return cls is other
        return vars(cls).get("_para_core_written", cls) is vars(other).get("_para_core_written", other)

    namespace = {
        "__eq__": lambda cls, other: same(cls, other) if isinstance(other, type) else NotImplemented,
        "__hash__": lambda cls: hash(vars(cls).get("_para_core_written") or id(cls)),
    }
    return type(base.__name__, (base,), namespace)


def is_entry(function: Any) -> bool:
    """Whether ``function`` is a method that :func:`wrap_method` has put into a private class."""
    return hasattr(getattr(function, "__func__", function), "_para_core_entry")


def _entry(method: str, original: Callable[..., Any], *, compiled_in_place: bool = False) -> Callable[..., Any]:
    """Return the function that becomes ``method`` of a private class. It runs the wrappers around ``original``.

    It looks up the wrappers in each call, because code such as Module.compile keeps this bound method while they
    change. With ``compiled_in_place`` a module that was compiled in place runs its own chain, whose innermost function
    is :func:`_call_as_original`.
    """
    chain = _CHAIN + method

    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self), chain, original)(self, *args, **kwargs)

    def enter_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        if not torch.compiler.is_compiling() and self.__dict__.get(COMPILED_CALL) is not None:
            return getattr(cls, _COMPILED_CHAIN, getattr(cls, chain, original))(self, *args, **kwargs)
        return getattr(cls, chain, original)(self, *args, **kwargs)

    entry: Any = enter_module if compiled_in_place else enter
    entry.__name__, entry.__doc__ = method, original.__doc__
    # Set __wrapped__, so that inspect.signature returns the signature of the original method.
    entry.__wrapped__ = original
    entry._para_core_entry = True
    return entry  # type: ignore[no-any-return]


def _dir_as_original(self: Any) -> list[str]:
    base = original_class(self)
    added = {name for name in vars(type(self)) if not hasattr(base, name)}
    return [name for name in super(type(self), self).__dir__() if name not in added]


def _reduce_as_original(self: Any, protocol: Any) -> Any:
    """Return the ``__reduce_ex__`` from which ``copy`` and ``pickle`` rebuild ``self`` with its original class.

    Raises:
        TypeError: The copy would lose a wrapper that does not permit plain copies.
    """
    lost = sorted({key for (key, _), (_, _, plain_copies) in _wrappers(self).items() if not plain_copies})
    if lost:
        raise TypeError(
            f"this {original_class(self).__name__} cannot be copied or pickled while para_core runs around it "
            f"({', '.join(lost)}): the copy would run without that, and differently on each rank. Undo it first "
            "(unparallelize_pipe(pipe), remove_cache_from_pipe(pipe), unparallelize_vae(vae)), "
            "make the copy, then apply it to both."
        )
    construct, arguments, *rest = super(type(self), self).__reduce_ex__(protocol)
    if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Use _reconstructor, which accepts any class, because pickle accepts __newobj__ only for the object's own
        # class.
        construct, arguments = copyreg._reconstructor, (type(self), object, None)  # type: ignore[attr-defined]
    base = original_class(self)
    return (construct, tuple(base if argument is type(self) else argument for argument in arguments), *rest)
