"""The hooks on a model and its blocks through which caches run or skip the blocks, and those of diffusers' caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from para_core.cache.blocks import BlockRole
from para_core.instance_patching import Around, WrapperPriority, submodules_of, unwrap, wrap_method, wrapper

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache

_KEY = "cache"
# Hooks that were removed from a model after a graph was compiled with them. The next cache of the model reuses them,
# because hooks change the class of a block, and a graph is valid only for the classes that it was compiled with. The
# model does not hold them, because a removed cache must leave nothing there; they refer to the model weakly.
_COMPILED: WeakKeyDictionary[nn.Module, BlockHookHost] = WeakKeyDictionary()

# The names of the diffusers modules that define the hooks of its caches.
_DIFFUSERS_CACHES = (
    "faster_cache",
    "first_block_cache",
    "mag_cache",
    "pyramid_attention_broadcast",
    "sea_cache",
    "taylorseer_cache",
    "text_kv_cache",
)

# Roles are the blocks that need a hook, in the order in which they run, each with its role for the cache.
Roles = list[tuple[nn.Module, BlockRole]]


class BlockHookHost:
    """All cache hooks on one model, and the cache that uses them. ``_COMPILED`` keeps this object for later caches."""

    def __init__(self) -> None:
        # The cache of the model call that is running, and the thread of this call.
        self.running: BlockCache | None = None
        self.thread = 0
        # The cache that handles calls of the model outside a pipeline.
        self.resident: BlockCache | None = None
        self._local = threading.local()
        # All caches that use these hooks. The hooks are removed with the last one.
        self.owners: WeakSet[Any] = WeakSet()
        self.attachments: list[BlockHooks] = []
        self.callers: list[ModelCallHook] = []
        self.traced = False
        # Keep classes of compiled graphs alive. The keys are ids, because a patched class compares equal to its
        # original, so the two would be the same key of a dict or set.
        self._classes: dict[int, type] = {}
        # Store the bound method: a model gets the class of its compiled graph again only if it is wrapped by the same
        # object, and each access of a method creates a new one.
        self.named: Around = self._run_named

    @property
    def branch(self) -> str | None:
        """The name that diffusers' ``cache_context`` gave the current CFG branch in this thread, or None."""
        name: str | None = getattr(self._local, "branch", None)
        return name

    def caller(self, key: str) -> ModelCallHook:
        """Return an unused hook around the model's call, created if all are in use. Its key is ``key`` and a number."""
        hooks = [caller for caller in self.callers if caller.key.rpartition(" ")[0] == key]
        free = next((hook for hook in hooks if hook.run is None), None)
        if free is None:
            free = ModelCallHook(f"{key} {len(hooks)}")
            self.callers.append(free)
        return free

    def remember(self, instance: Any) -> None:
        """Keep the class that a hook gave ``instance`` alive, because compiled graphs are valid only for this class."""
        self._classes[id(type(instance))] = type(instance)

    @contextmanager
    def _run_named(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Run diffusers' ``cache_context(name)``, and record the name of the CFG branch."""
        with self.in_branch(str(args[0] if args else kwargs["name"])), call(module, *args, **kwargs):
            yield

    @contextmanager
    def in_branch(self, name: str) -> Iterator[None]:
        """Name the CFG branch of the model calls of this thread inside the ``with`` block."""
        before, self._local.branch = self.branch, name
        try:
            with nullcontext() if self.resident is None else self.resident.in_branch(name):
                yield
        finally:
            self._local.branch = before


class ModelCallHook:
    """A hook around a model's call, used by at most one cache or pipeline. Pipelines that share a model have one each.

    ``key`` is the name under which the hook is installed.
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
    """The hooks on a model's blocks. All caches that give every block the same role share them."""

    def __init__(self, host: BlockHookHost, module: nn.Module, roles: Roles) -> None:
        self.host = host
        self._module = ref(module)
        self._roles = [(ref(block), role) for block, role in roles]
        self._arounds = {role: self._around_block(role) for _, role in roles}

    def fits(self, roles: Roles) -> bool:
        """Whether these hooks are on the blocks of ``roles`` with equal roles, so that another cache can share them."""
        return [(block(), role) for block, role in self._roles] == roles

    def _around_block(self, role: BlockRole) -> Around:
        host = self.host

        def run_block(call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            cache = host.running or host.resident
            # A cache that runs in another thread is not for this call, which may come from a pipeline without a cache.
            in_other_thread = (
                not torch.compiler.is_compiling() and host.running is not None and host.thread != get_ident()
            )
            if in_other_thread or cache is None:
                return call(block, *args, **kwargs)
            return cache.run_block(role, block, call, args, kwargs)

        run_block.attachment = self  # type: ignore[attr-defined]
        return run_block

    def install(self) -> None:
        for block, role in self._roles:
            # Blocks with equal roles share a wrapper, and so a class and a graph.
            wrap_method(block(), "__call__", _KEY, self._arounds[role], order=WrapperPriority.CACHED_BLOCK)
            self.host.remember(block())
        module = self._module()
        if hasattr(module, "cache_context"):
            wrap_method(module, "cache_context", _KEY, self.host.named, order=WrapperPriority.CACHE)
            self.host.remember(module)

    def remove(self) -> None:
        """Remove the hooks from the model and its blocks, but keep their classes alive for compiled graphs."""
        for reference in (self._module, *[block for block, _ in self._roles]):
            module = reference()
            if module is not None:
                self.host.remember(module)
                unwrap(module, _KEY)


def attach(module: nn.Module, roles: Roles, cache: BlockCache) -> BlockHookHost:
    """Install hooks on the blocks in ``roles`` for ``cache``, or share equal hooks, and return the object with them."""
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


def detach(module: nn.Module, roles: Roles, cache: BlockCache, *, traced: bool) -> None:
    """Undo :func:`attach`. The hooks are removed from the model unless another cache uses them.

    If ``traced``, a graph was compiled with ``cache``, and the next cache of the model gets the same hooks again.
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


def host_of(module: nn.Module) -> BlockHookHost | None:
    """Return the object that holds the cache hooks on ``module``; None if no cache is attached to it."""
    hooks = next((hooks for hooks in map(_hooks_of, submodules_of(module)) if hooks is not None), None)
    return None if hooks is None else hooks.host


def _hooks_of(block: nn.Module) -> BlockHooks | None:
    hooks = getattr(wrapper(block, "__call__", _KEY), "attachment", None)
    return hooks if isinstance(hooks, BlockHooks) else None


def last_outcomes(module: nn.Module) -> list[Any]:
    """Return the outcome of the last decision of each cache on ``module``."""
    hooks = next((hooks for part in module.modules() if (hooks := _hooks_of(part)) is not None), None)
    return [] if hooks is None else [cache.outcome for cache in hooks.host.owners]


def foreign_cache(module: nn.Module) -> str | None:
    """Return the config or hook class name of diffusers' cache on ``module``; None if no such cache is enabled."""
    config: Any = getattr(module, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for part in submodules_of(module):
        registry: Any = part.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            # Look for hooks too, because apply_first_block_cache(transformer, ...) and similar functions set no
            # _cache_config.
            if type(hook).__module__.rsplit(".", maxsplit=1)[-1] in _DIFFUSERS_CACHES:
                return type(hook).__name__
    return None


def require_no_foreign_cache(module: nn.Module) -> None:
    """Raise ``ValueError`` if one of diffusers' own caches is enabled on ``module``."""
    cache = foreign_cache(module)
    if cache is not None:
        raise ValueError(
            f"this {type(module).__name__} has a cache of diffusers ({cache}), and two caches would skip the same "
            "blocks. Call disable_cache() of the transformer first; apply_cache_on_pipe(pipe, ...) then is its only "
            "cache."
        )
