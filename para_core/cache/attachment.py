"""Hooks on a model and on its blocks, through which caches run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from para_core.cache.blocks import BlockRole
from para_core.instance_patching import Around, WrapperPriority, unwrap, wrap_alike, wrap_method, wrapper

_KEY = "cache"
# Maps a model to the host of hooks that were removed after a graph was compiled with them. The next cache of the model
# reuses the host, because a graph is valid only for the classes that it was compiled with. It is not an attribute of
# the model, because a removed cache must leave nothing there. The host refers to its model weakly, so the entry
# disappears with the model.
_COMPILED: WeakKeyDictionary[nn.Module, BlockHookHost] = WeakKeyDictionary()

# The blocks that need a hook, in the order in which they run.
Roles = list[tuple[nn.Module, BlockRole]]


class BlockRunner(Protocol):
    """The interface of a cache for its hooks."""

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``block`` by ``call(block, *args, **kwargs)``, or skip it. Returns its output."""

    def in_branch(self, name: str) -> AbstractContextManager[None]:
        """Use the state of the branch ``name`` while the block runs."""


class BlockHookHost:
    """The hooks of one model, and the cache that uses them now.

    A graph is valid only for the classes that it was compiled with. After a graph was compiled, the hooks are kept when
    the last cache is removed, and the next cache gets the same ones.
    """

    def __init__(self) -> None:
        # The cache of the current call, and the thread of that call.
        self.running: BlockRunner | None = None
        self.thread = 0
        # The cache of calls without a pipeline.
        self.resident: BlockRunner | None = None
        self._local = threading.local()
        # The caches that use these hooks.
        self.owners: WeakSet[Any] = WeakSet()
        self.attachments: list[BlockHooks] = []
        self.callers: list[ModelCallHook] = []
        self.traced = False
        # By id, because these classes compare equal to their originals.
        self._classes: dict[int, type] = {}
        self.named = self._make_named()

    @property
    def branch(self) -> str | None:
        """The name that diffusers' ``cache_context`` gives the current branch in this thread, or None."""
        name: str | None = getattr(self._local, "branch", None)
        return name

    def caller(self, key: str) -> ModelCallHook:
        """Return a hook of the model's call that no cache uses, with a key that begins with ``key``."""
        hooks = [caller for caller in self.callers if caller.key.startswith(key)]
        free = next((hook for hook in hooks if hook.run is None), None)
        if free is None:
            free = ModelCallHook(f"{key} {len(hooks)}")
            self.callers.append(free)
        return free

    def remember(self, instance: Any) -> None:
        """Keep the present class of ``instance`` alive."""
        self._classes[id(type(instance))] = type(instance)

    def _make_named(self) -> Around:
        @contextmanager
        def named(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Iterator[None]:
            before, name = self.branch, str(args[0] if args else kwargs["name"])
            self._local.branch = name
            try:
                with (
                    nullcontext() if self.resident is None else self.resident.in_branch(name),
                    call(module, *args, **kwargs),
                ):
                    yield
            finally:
                self._local.branch = before

        return named


class ModelCallHook:
    """A hook of a model's call, for one cache or one pipeline. Several pipelines may share the model.

    Args:
        key: The key of the wrapper.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.run: Around | None = None
        self.cache: object = None

        def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return call(module, *args, **kwargs) if self.run is None else self.run(call, module, *args, **kwargs)

        around.caller = self  # type: ignore[attr-defined]
        self.around = around

    def free(self) -> None:
        self.run = self.cache = None


class BlockHooks:
    """Hooks of the blocks of one model, for caches with the same roles."""

    def __init__(self, host: BlockHookHost, module: nn.Module, roles: Roles) -> None:
        self.host = host
        self._module = ref(module)
        self._roles = [(ref(block), role) for block, role in roles]
        self._arounds = {role: self._around_block(role) for _, role in roles}

    def fits(self, roles: Roles) -> bool:
        """Whether the hooks are on the same blocks with the same roles."""
        own = [(block(), role) for block, role in self._roles]
        return len(own) == len(roles) and all(
            block is other and role == other_role for (block, role), (other, other_role) in zip(own, roles, strict=True)
        )

    def _around_block(self, role: BlockRole) -> Around:
        host = self.host

        def run_block(call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            cache = host.running or host.resident
            # A pipeline without a cache may use the model in another thread.
            in_other_thread = (
                not torch.compiler.is_compiling() and host.running is not None and host.thread != get_ident()
            )
            if in_other_thread or cache is None:
                return call(block, *args, **kwargs)
            return cache.run_block(role, block, call, args, kwargs)

        run_block.attachment = self  # type: ignore[attr-defined]
        return run_block

    def install(self) -> None:
        for role, around in self._arounds.items():
            blocks = [block() for block, other in self._roles if other == role]
            wrap_alike(blocks, "__call__", _KEY, around, order=WrapperPriority.CACHED_BLOCK)
        module = self._module()
        if hasattr(module, "cache_context"):
            wrap_method(module, "cache_context", _KEY, self.host.named, order=WrapperPriority.CACHE)

    def remove(self) -> None:
        """Remove the hooks from the model and its blocks."""
        for reference in (self._module, *[block for block, _ in self._roles]):
            module = reference()
            if module is not None:
                self.host.remember(module)
                unwrap(module, _KEY)


def attach(module: nn.Module, roles: Roles, cache: BlockRunner) -> BlockHookHost:
    """Install hooks with these ``roles`` for ``cache``, and return their host. Hooks that are installed and fit are
    kept.
    """
    installed = _hooks_of(roles[0][0])
    compiled = _COMPILED.pop(module, None)
    host = compiled or BlockHookHost() if installed is None else installed.host
    if installed is None or not installed.fits(roles):
        if installed is not None:
            installed.remove()
        hooks = next((hooks for hooks in host.attachments if hooks.fits(roles)), None)
        if hooks is None:
            hooks = BlockHooks(host, module, roles)
            host.attachments.append(hooks)
        hooks.install()
    host.owners.add(cache)
    return host


def detach(module: nn.Module, roles: Roles, cache: BlockRunner, *, traced: bool) -> None:
    """Undo :func:`attach`, unless another cache uses the same hooks.

    Args:
        traced: Whether a graph was compiled with ``cache``.
    """
    installed = _hooks_of(roles[0][0])
    if installed is None:
        return
    host = installed.host
    host.traced = host.traced or traced
    host.owners.discard(cache)
    if host.resident is cache:
        host.resident = None
    if not host.owners:
        installed.remove()
        if host.traced:
            _COMPILED[module] = host


def _hooks_of(block: nn.Module) -> BlockHooks | None:
    hooks = getattr(wrapper(block, "__call__", _KEY), "attachment", None)
    return hooks if isinstance(hooks, BlockHooks) else None
