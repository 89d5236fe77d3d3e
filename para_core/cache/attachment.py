"""What stands around the blocks of a model, for the caches that run there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from para_core.cache.blocks import Role
from para_core.instance_patching import Around, WrapperPriority, unwrap, wrap_alike, wrap_method, wrapper

_KEY = "cache"
# By model, what stood around it when a graph was compiled, and was removed since: a graph fits the classes that it was compiled with.
# Here and not at the model, of which nothing may be left behind. A site refers to its model weakly, so the entry goes with the model.
_COMPILED: WeakKeyDictionary[nn.Module, BlockHookHost] = WeakKeyDictionary()


# Each block at which something is done, in the order in which they run.
Roles = list[tuple[nn.Module, Role]]


class BlockRunner(Protocol):
    """A cache, as far as what stands around a model knows it."""

    def run_block(
        self,
        role: Role,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """In place of ``call(block, *args, **kwargs)``."""

    def in_branch(self, name: str) -> AbstractContextManager[None]:
        """Inside, calls of the model are of the branch ``name``."""


class BlockHookHost:
    """One model at which caches run, or ran: whose turn it is, and what stands around the model and its blocks.

    A graph fits the classes that it was compiled with. So where one was, they are kept when the last cache is removed, and
    the next cache gets the same.
    """

    def __init__(self) -> None:
        # Of the call under way, and the thread that makes it; and of calls that no pipeline makes.
        self.running: BlockRunner | None = None
        self.thread = 0
        self.resident: BlockRunner | None = None
        self._local = threading.local()
        # Those for which it stands.
        self.owners: WeakSet[Any] = WeakSet()
        self.attachments: list[BlockHooks] = []
        self.callers: list[ModelCallHook] = []
        self.traced = False
        # By id: these classes compare equal to their originals.
        self._classes: dict[int, type] = {}
        self.named = self._make_named()

    @property
    def branch(self) -> str | None:
        """What diffusers' ``cache_context`` calls the branch under way in this thread."""
        found: str | None = getattr(self._local, "branch", None)
        return found

    def caller(self, key: str) -> ModelCallHook:
        """One that is free."""
        alike = [caller for caller in self.callers if caller.key.startswith(key)]
        free = next((caller for caller in alike if caller.run is None), None)
        if free is None:
            free = ModelCallHook(f"{key} {len(alike)}")
            self.callers.append(free)
        return free

    def remember(self, instance: Any) -> None:
        """Keep the class that ``instance`` has now."""
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
    """What stands around a model for one cache, or for one pipeline: others may share the model.

    Args:
        key: under which it is wrapped.
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
    """What stands around the blocks of one model, for caches of the same roles."""

    def __init__(self, site: BlockHookHost, module: nn.Module, roles: Roles) -> None:
        self.site = site
        self._module = ref(module)
        self._roles = [(ref(block), role) for block, role in roles]
        self._arounds = {role: self._around_block(role) for _, role in roles}

    def fits(self, roles: Roles) -> bool:
        """Whether it stands around the same blocks, for the same roles."""
        own = [(block(), role) for block, role in self._roles]
        return len(own) == len(roles) and all(
            block is other and role == other_role for (block, role), (other, other_role) in zip(own, roles, strict=True)
        )

    def _around_block(self, role: Role) -> Around:
        site = self.site

        def run_block(call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            cache = site.running or site.resident
            # A pipe without a cache may use the model in another thread.
            elsewhere = not torch.compiler.is_compiling() and site.running is not None and site.thread != get_ident()
            if elsewhere or cache is None:
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
            wrap_method(module, "cache_context", _KEY, self.site.named, order=WrapperPriority.CACHE)

    def remove(self) -> None:
        """Give the blocks back as they were."""
        for reference in (self._module, *[block for block, _ in self._roles]):
            module = reference()
            if module is not None:
                self.site.remember(module)
                unwrap(module, _KEY)


def attach(module: nn.Module, roles: Roles, cache: BlockRunner) -> BlockHookHost:
    """The site of ``module``, with what stands around its blocks for ``cache``: what stood there, if it fits."""
    standing = _attachment_at(roles[0][0])
    site = _site_of(module, standing)
    if standing is None or not standing.fits(roles):
        if standing is not None:
            standing.remove()
        found = next((known for known in site.attachments if known.fits(roles)), None)
        if found is None:
            found = BlockHooks(site, module, roles)
            site.attachments.append(found)
        found.install()
    site.owners.add(cache)
    return site


def detach(module: nn.Module, roles: Roles, cache: BlockRunner, *, traced: bool) -> None:
    """Undo :func:`attach`, unless another cache runs on the same model.

    Args:
        traced: a graph was compiled with it.
    """
    standing = _attachment_at(roles[0][0])
    if standing is None:
        return
    site = standing.site
    site.traced = site.traced or traced
    site.owners.discard(cache)
    if site.resident is cache:
        site.resident = None
    if not site.owners:
        standing.remove()
        if site.traced:
            _COMPILED[module] = site


def _site_of(module: nn.Module, standing: BlockHooks | None) -> BlockHookHost:
    compiled = _COMPILED.pop(module, None)
    if standing is not None:
        return standing.site
    return BlockHookHost() if compiled is None else compiled


def _attachment_at(block: nn.Module) -> BlockHooks | None:
    found = getattr(wrapper(block, "__call__", _KEY), "attachment", None)
    return found if isinstance(found, BlockHooks) else None
