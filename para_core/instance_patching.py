"""Changing what one object does when it is called, and nothing about any other object of its class.

Python looks ``__call__`` up on the class, so an instance gets a private subclass of its own class: same name, same
module. All that is added lives in that class; the instance's attributes, hooks and ``forward`` stay untouched, so whatever
else replaces them (offload, LoRA) goes on and off in any order. A graph that was compiled for the instance sees another
type, and is compiled again, unless what is wrapped is the call of a module that was compiled in place.

``copy`` and ``pickle`` rebuild an object from its class and attributes, so a copy would lose the wrappers: one rank would
then run it alone, without an error. They raise for a wrapped instance, unless every wrapper allows a plain copy.
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

from para_core.torch_internals import (
    COMPILED_CALL,
    ORIGINAL_CALLABLE,
    ORIGINAL_MODULE,
    SUBMODULES,
    TracingContext,
    compile_context,
)

# around(call, instance, *args, **kwargs): `call(instance, *args, **kwargs)` is what would have run. The first two are positional-only,
# for a method may have parameters of these names.
Around = Callable[..., Any]


class WrapperPriority(IntEnum):
    """What stands around one method, from the outermost to the innermost, whichever came first."""

    # Before a cache is set up, all ranks know that they make the same call.
    PARALLEL = auto()
    # A cache sees the calls that this rank computes.
    GUIDANCE = auto()
    # It tells branches apart by whole arguments.
    CACHE = auto()
    # What stages give each other is whole: a plan has gathered it.
    STAGES = auto()
    # Of a patch, a plan shards what it is given among ranks, and gathers it again.
    PATCH = auto()
    # A cache measures what a block makes of its own tokens.
    PLAN = auto()
    # What a module makes is of all tokens, before ranks share it.
    PATCH_OUTPUTS = auto()
    CACHED_BLOCK = auto()
    # A block that a cache skips waits for no other stage.
    STAGED_BLOCK = auto()


# A private subclass holds under this prefix and the method's name what runs instead of that method.
_CHAIN = "_para_core_chain_"
# The same for a module that was compiled in place.
_COMPILED_CHAIN = "_para_core_compiled_call"


def wrap_method(
    instance: Any, method: str, key: str, around: Around, *, order: WrapperPriority, plain_copies: bool = False
) -> None:
    """Put ``around`` around ``method`` of this one instance; a wrapper of the same ``key`` is replaced.

    Not for two threads that change the same instance at once.

    Args:
        order: where it stands among others; of the same, what came last is outside.
        plain_copies: Whether ``copy`` and ``pickle`` may make an instance without this wrapper. By default they raise.
    """
    wrap_alike([instance], method, key, around, order=order, plain_copies=plain_copies)


def wrap_alike(
    instances: Iterable[Any],
    method: str,
    key: str,
    around: Around,
    *,
    order: WrapperPriority,
    plain_copies: bool = False,
) -> None:
    """:func:`wrap_method` for each of ``instances``: those that were alike before still share one class.

    So a graph that was compiled for one block of a model still fits the others.
    """
    changed: dict[int, tuple[type, type]] = {}  # by id: these classes compare equal to their originals
    for instance in instances:
        before = type(instance)
        if id(before) not in changed:
            _set_wrappers(instance, {**_wrappers(instance), (key, method): (order, around, plain_copies)})
            changed[id(before)] = (before, type(instance))
        else:
            instance.__class__ = changed[id(before)][1]


def unwrap(instance: Any, key: str) -> None:
    """Remove what was put around the methods of ``instance`` under ``key``; the last removal restores its class."""
    if is_wrapped(instance, key):  # else its class stays, and the graphs that were compiled for it
        _set_wrappers(instance, {name: around for name, around in _wrappers(instance).items() if name[0] != key})


def is_wrapped(instance: Any, key: str) -> bool:
    """Whether :func:`wrap_method` was called with ``key``, and not undone."""
    return any(name[0] == key for name in _wrappers(instance))


def wrapper(instance: Any, method: str, key: str) -> Around | None:
    """What :func:`wrap_method` put around ``method`` under ``key``; None if nothing."""
    return _wrappers(instance).get((key, method), (None, None, None))[1]


def instances_in(instance: Any) -> list[Any]:
    """Return ``instance``, the modules among its attributes, and all modules inside them, each once."""
    parts = [instance] if isinstance(instance, nn.Module) else vars(instance).values()
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    return list({id(x): x for x in (instance, *modules)}.values())


@contextmanager
def restored_on_failure(instances: Iterable[Any]) -> Iterator[None]:
    """Give each of ``instances`` its present wrappers, and so its present class, back if the block raises."""
    # The classes are kept alive, so that the same wrappers give the same class again.
    before = [(instance, type(instance), _wrappers(instance)) for instance in instances]
    try:
        yield
    except BaseException:
        for instance, _, wrappers in before:
            _set_wrappers(instance, wrappers)
        raise


class ForwardOfInstance:
    """Something around a ``forward`` that hooks put on one instance, which hides whatever :func:`wrap_method` puts around its class's.

    Whoever comes later may keep it, and put another one around it: after :meth:`remove` it only hands on.
    """

    def __init__(self, instance: Any, around: Around) -> None:
        self._instance, self._around = instance, around
        self._before: Callable[..., Any] = vars(instance)["forward"]
        self._removed = False

    @classmethod
    def put_on(cls, instance: Any, around: Around) -> ForwardOfInstance:
        """Put ``around`` around the ``forward`` that ``instance`` has of its own."""
        made = cls(instance, around)
        instance.forward = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._before(*args, **kwargs)
        return self._around(lambda _, *rest, **named: self._before(*rest, **named), self._instance, *args, **kwargs)

    def remove(self) -> None:
        """Hand on alone from now on; and give the instance back what it had, unless something else was put there since."""
        self._removed = True
        if vars(self._instance).get("forward") is self:
            self._instance.forward = self._before


def original_class(instance: Any) -> type:
    """The class of ``instance`` before any wrapping."""
    base: type = vars(type(instance)).get("_para_core_original", type(instance))
    return base


def unwrapped_class(instance: Any) -> type:
    """The class of ``instance`` as its author wrote it: before any wrapping, and before PyTorch's FSDP2, which makes classes, too."""
    return _without_fsdp(original_class(instance))


def _without_fsdp(cls: type) -> type:
    """Return ``cls``, or the class that FSDP2 derived it from."""

    def of_fsdp(cls: type) -> bool:
        return any(base.__module__.startswith("torch.distributed.fsdp") for base in (cls, *cls.__bases__))

    return next(base for base in cls.__mro__ if not of_fsdp(base))


@contextmanager
def unwrapped(instances: Iterable[Any]) -> Iterator[None]:
    """Inside, each of ``instances`` has its original class; afterwards what was around its methods is around those of the class it
    then has. For what gives an instance another class, and would take the private one for its base."""
    wrappers = [(instance, _wrappers(instance)) for instance in instances]
    try:
        for instance, _ in wrappers:
            _set_wrappers(instance, {})
        yield
    finally:
        for instance, found in wrappers:
            _set_wrappers(instance, found)


def uncompiled(module: Any) -> Any:
    """The module inside what ``torch.compile`` made of it."""
    return getattr(module, ORIGINAL_MODULE, module)


def is_compiled(module: Any) -> bool:
    """Whether ``module`` itself was compiled: as a module, in place, or its ``forward`` alone."""
    state = module.__dict__
    if state.get(COMPILED_CALL) is not None or ORIGINAL_MODULE in state[SUBMODULES]:
        return True
    return "forward" in state and hasattr(state["forward"], ORIGINAL_CALLABLE)


def is_compiled_without_breaks(module: Any) -> bool:
    """Return whether ``module`` itself was compiled with ``fullgraph=True``: as a module, in place, or its ``forward`` alone."""
    state = module.__dict__
    contexts = [state.get("dynamo_ctx")]
    contexts += [compile_context(compiled) for compiled in (state.get(COMPILED_CALL), state.get("forward"))]
    return any(getattr(context, "fullgraph", False) for context in contexts)


def has_compiled_parts(module: Any) -> bool:
    """Whether ``module`` or anything inside of it was compiled."""
    found = [module]
    for one in found:  # grows as it goes: this runs at every call, over a thousand modules
        if is_compiled(one):
            return True
        children = one.__dict__[SUBMODULES]
        if children:
            found.extend([child for child in children.values() if child is not None])
    return False


class ModuleTree:
    """A snapshot of ``module`` and all modules inside it, which answers at every call of the model what may have changed.

    A model has over a thousand modules, so the answers are computed by loops in C, without a Python call per module.
    """

    def __init__(self, module: nn.Module) -> None:
        modules: list[nn.Module] = [module]
        for one in modules:  # The list grows while it is walked.
            modules.extend([child for child in one.__dict__[SUBMODULES].values() if child is not None])
        self._states = [one.__dict__ for one in modules]
        self._child_dicts = [state[SUBMODULES] for state in self._states]
        self._children = self._children_now()
        self._holds_compiled_module = any(ORIGINAL_MODULE in children for children in self._child_dicts)

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._child_dicts)))

    def is_unchanged(self) -> bool:
        """Return whether the same modules still stand in the same places."""
        return self._children_now() == self._children

    def has_compiled_parts(self) -> bool:
        """Return what :func:`has_compiled_parts` returns for the module, if the tree is unchanged."""
        if self._holds_compiled_module or any(map(dict.get, self._states, repeat(COMPILED_CALL))):
            return True
        if not any(map(dict.__contains__, self._states, repeat("forward"))):
            return False
        return any(hasattr(state.get("forward"), ORIGINAL_CALLABLE) for state in self._states)


# By key and method: the order, the wrapper, and whether copies may be made without it.
Wrappers = Mapping[tuple[str, str], tuple[WrapperPriority, Around, bool]]


def _wrappers(instance: Any) -> Wrappers:
    # Not by vars(): blocks ask in graphs, and Dynamo takes no look at all that a class holds.
    found: Wrappers = getattr(type(instance), "_para_core_wrappers", {})
    return found


def _set_wrappers(instance: Any, wrappers: Wrappers) -> None:
    base = original_class(instance)
    if not wrappers:
        if type(instance) is not base:
            instance.__class__ = base
        return
    # In the order in which they came.
    key = id(base), *[(name, order, id(around), plain) for name, (order, around, plain) in wrappers.items()]
    made = _CLASSES.get(key) or _class_of(base, wrappers)
    _CLASSES[key] = made
    instance.__class__ = made


# Of the same wrappers, the same class, as long as anyone has it. It holds what its key names.
_CLASSES: WeakValueDictionary[Any, type] = WeakValueDictionary()


def _class_of(base: type, wrappers: Wrappers) -> type:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
        "__reduce_ex__": _reduce_as_original,
        "__dir__": _dir_as_original,
        "_para_core_original": base,
        "_para_core_written": _without_fsdp(base),
        "_para_core_wrappers": wrappers,
    }
    innermost_first = sorted(wrappers.items(), key=lambda item: -item[1][0])
    for (_, method), (_, around, _) in innermost_first:
        chain = _CHAIN + method
        # Partials are no frames: each wrapper calls the next one.
        namespace[chain] = partial(around, namespace.get(chain) or getattr(base, method))
        namespace[method] = _dispatch(method, getattr(base, method))
    if issubclass(base, nn.Module) and all(method == "__call__" for _, method in wrappers):
        call: Callable[..., Any] = partial(_call_as_original, base)
        for _, (_, around, _) in innermost_first:
            call = partial(around, call)
        namespace[_COMPILED_CHAIN] = call
        namespace["__call__"] = _entry_of_module(base.__call__)
    made: type = _metaclass(type(base))(base.__name__, (base,), namespace)
    return made


def _call_as_original(base: type, /, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``module``, which was compiled in place, inside all of its wrappers. It is of its original class meanwhile.

    Dynamo compiles anew for each class. The blocks of a model share their graphs, although the first and the last have wrappers of their own.
    """
    private = type(module)
    module.__class__ = base
    try:
        return base.__call__(module, *args, **kwargs)
    finally:
        if private is not base:
            module.__class__ = private


@cache
def _metaclass(base: type) -> type:
    """The type of private subclasses: as keys, and for ``==`` and ``in``, they are the class that their author wrote.

    diffusers' ``from_pipe`` asks ``type(component) in (...)``, and so do tables by class. But not to Dynamo: it finds what
    ``super()`` means by ``mro.index(cls)``, would take the private class for the one it stands for, and call itself for ever.
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
    """Whether ``function`` is a method that :func:`wrap_method` gave an instance."""
    return hasattr(getattr(function, "__func__", function), "_para_core_entry")


def _dispatch(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    chain = _CHAIN + method

    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up anew: whoever keeps the bound method (Module.compile does) gets what is wrapped now, if anything.
        return getattr(type(self), chain, original)(self, *args, **kwargs)

    return _presented_as(enter, method, original)


def _entry_of_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``__call__`` of a module of which nothing else is wrapped."""
    chain = _CHAIN + "__call__"

    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        if not torch.compiler.is_compiling() and self.__dict__.get(COMPILED_CALL) is not None:
            return getattr(cls, _COMPILED_CHAIN, getattr(cls, chain, original))(self, *args, **kwargs)
        return getattr(cls, chain, original)(self, *args, **kwargs)

    return _presented_as(enter, "__call__", original)


def _presented_as(enter: Any, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    enter.__name__ = method
    enter.__doc__ = original.__doc__
    # inspect.signature follows it: what a caller asks about is the original.
    enter.__wrapped__ = original
    enter._para_core_entry = True
    entry: Callable[..., Any] = enter
    return entry


def _dir_as_original(self: Any) -> list[str]:
    base = original_class(self)
    added = {name for name in vars(type(self)) if not hasattr(base, name)}
    return [name for name in super(type(self), self).__dir__() if name not in added]


def _reduce_as_original(self: Any, protocol: Any) -> Any:
    """Reduce ``self`` to an instance of its original class, for ``copy`` and ``pickle``.

    Raises:
        TypeError: A wrapper would be lost.
    """
    lost = sorted({key for (key, _), (_, _, plain_copies) in _wrappers(self).items() if not plain_copies})
    if lost:
        raise TypeError(
            f"this {original_class(self).__name__} cannot be copied or pickled while para_core runs around it ({', '.join(lost)}): the "
            "copy would run without that, and differently on each rank. Undo it first (unparallelize_pipe(pipe), "
            "remove_cache_from_pipe(pipe), unshard_weights(pipe), unparallelize_vae(vae)), make the copy, then apply it to both."
        )
    construct, arguments, *rest = super(type(self), self).__reduce_ex__(protocol)
    if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle insists that it makes the class of the object at hand; this one of the standard library may make any.
        construct, arguments = copyreg._reconstructor, (type(self), object, None)  # type: ignore[attr-defined]
    base = original_class(self)
    return (construct, tuple(base if argument is type(self) else argument for argument in arguments), *rest)
