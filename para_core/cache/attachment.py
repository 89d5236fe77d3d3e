"""The hooks on a model and its blocks through which caches run or skip the blocks, and a search for diffusers' own.

:class:`~para_core.cache.block_cache.BlockCache` attaches and detaches them; what they do with a block is in
:mod:`.block_run`. Tests: tests/cache/test_state.py, tests/cache/test_flux.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from para_core.cache.block_roles import BlockRole
from para_core.cache.block_run import run_first_block, run_or_skip_block
from para_core.instance.modules import submodules_of
from para_core.instance.record import Wrapper, empty_slots, fill_slot, slot_owner
from para_core.instance.slots import Slot

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache

# The modules in ``diffusers/hooks`` (0.42) that define the hooks of its caches. A cache of a newer diffusers
# is not seen until its module is added; tests/cache/test_flux.py then fails.
DIFFUSERS_CACHES = (
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


class _ThreadState(threading.local):
    # The name that diffusers' ``cache_context`` gave the current CFG branch in this thread, or None.
    branch: str | None = None


class BlockHookHost:
    """The hooks on one model and its blocks, in their slots ``CACHED_BLOCK``, and the caches that use them.

    Several caches may share it, such as those of two pipelines with one model. A call that begins while
    another one runs raises (:func:`already_running`). The protocol:

    - :meth:`BlockCache._call_blocks` sets ``thread``, then ``running``, for a call, and only it: a hook in
      another thread that sees ``running`` must see its thread, too. At the end it sets ``running`` to None.
    - :func:`~para_core.cache.apply.apply_cache` sets ``resident``, and ``applied_to`` of that cache, by which
      ``remove_cache`` finds what to undo; :func:`detach` clears ``resident``.
    - ``local.branch`` is set by ``cache_context``, per thread.
    - :func:`attach` compares ``roles`` with those of the next cache, first by identity: the roles are
      installed again only if they differ. A cache keeps the list ``roles`` itself (:meth:`BlockCache.attach`),
      so :meth:`BlockCache.run` sees by identity that another one has replaced its hooks.
    """

    def __init__(self) -> None:
        # The cache of the model call that is running, and the thread of this call.
        self.running: BlockCache | None = None
        self.thread = 0
        # The cache that handles calls of the model outside a pipeline.
        self.resident: BlockCache | None = None
        self.local = _ThreadState()
        # All caches that use these hooks. detach removes the hooks with the last one. If the caches are
        # merely collected, the hooks stay, and only call the blocks.
        self.owners: WeakSet[Any] = WeakSet()
        self.roles: Roles = []

    @contextmanager
    def _run_named(
        self, call: Callable[..., Any], module: nn.Module | None, /, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Run ``call``, diffusers' ``cache_context(name)``, and give the CFG branch of this thread that name,
        too.

        The resident cache names its branch as well. Used in place of the model's method and by
        :meth:`in_branch`.
        """
        name = str(args[0] if args else kwargs["name"])
        before = self.local.branch
        self.local.branch = name
        state: AbstractContextManager[None] = nullcontext()
        if self.resident is not None:
            state = self.resident.in_branch(name)
        try:
            with state, call(module, *args, **kwargs):
                yield
        finally:
            self.local.branch = before

    def in_branch(self, name: str) -> AbstractContextManager[None]:
        """Return a context that names the CFG branch of the model calls of this thread."""
        return self._run_named(lambda *_: nullcontext(), None, name)

    def install(self, module: nn.Module, roles: Roles) -> None:
        """Put hooks on the blocks in ``roles``, in place of earlier ones, and on ``module``."""
        self.remove(module)
        contexts: dict[str, Wrapper] = {}
        if hasattr(module, "cache_context"):
            contexts["cache_context"] = self._run_named
        fill_slot(module, Slot.CACHED_BLOCK, contexts, owner=self)
        # Blocks with equal roles share a function, and so a graph.
        wrappers = {role: self._wrap_blocks(role) for _, role in roles}
        for block, role in roles:
            fill_slot(block, Slot.CACHED_BLOCK, {"__call__": wrappers[role]}, owner=self)
        self.roles = roles

    def remove(self, module: nn.Module) -> None:
        """Remove the hooks from ``module`` and its blocks."""
        empty_slots([module, *(block for block, _ in self.roles)], Slot.CACHED_BLOCK)
        self.roles = []

    def _wrap_blocks(self, role: BlockRole) -> Wrapper:
        """Return the function that runs around the calls of all blocks with this ``role``."""

        def run_block(call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            cache = self.running or self.resident
            # A cache that runs in another thread is not for this call, which may come from a pipeline without
            # a cache. A graph would keep the answer of the thread that traced it, so it does not ask.
            in_other_thread = (
                not torch.compiler.is_compiling() and self.running is not None and self.thread != get_ident()
            )
            if in_other_thread or cache is None or cache.idle:
                return call(block, *args, **kwargs)
            if not role.skipped:
                return run_first_block(cache, role, block, call, args, kwargs)
            # Most blocks are inner ones, which need nothing else. This saves a Python call for each. In a
            # graph, ``skip`` is a tensor, so compare by identity.
            if role.is_inner and cache.skip is True:
                return role.pass_on(args, kwargs)
            if role.is_inner and (cache.skip is None or cache.skip is False):
                return call(block, *args, **kwargs)
            return run_or_skip_block(cache, role, block, call, args, kwargs)

        return run_block


def attach(module: nn.Module, roles: Roles, cache: BlockCache) -> BlockHookHost:
    """Install hooks on the blocks in ``roles`` for ``cache``, and return the object with them.

    Hooks with equal roles stay, and are shared. Others are replaced: the caches that use them notice it in
    their next call, and call this function again.

    Raises:
        RuntimeError: Hooks would be replaced in a call that uses them.
    """
    host = host_of(module) or BlockHookHost()
    if host.roles is not roles and host.roles != roles:
        if host.running is not None:
            raise already_running(module)
        host.install(module, roles)
    host.owners.add(cache)
    return host


def already_running(module: nn.Module) -> RuntimeError:
    """Return (not raise) the error that a call of ``module`` with a cache cannot begin inside another one."""
    return RuntimeError(
        f"this {type(module).__name__} with a cache is already running, in another thread or around this call (a hook "
        "or a callback calls it again). Both calls would use the same cache. Use one thread and no nested call, or a "
        "copy of the model for each."
    )


def detach(module: nn.Module, cache: BlockCache) -> None:
    """Undo :func:`attach`. The hooks are removed from the model unless another cache uses them."""
    host = host_of(module)
    if host is None:
        return
    host.owners.discard(cache)
    if host.resident is cache:
        host.resident = None
    if not host.owners:
        host.remove(module)


def host_of(module: nn.Module) -> BlockHookHost | None:
    """Return the object that holds the cache hooks on ``module``; None if no cache is attached to it."""
    return slot_owner(module, Slot.CACHED_BLOCK, BlockHookHost)


def last_outcomes(module: nn.Module) -> list[Any]:
    """Return the outcome of the last decision of each cache on ``module``, also of caches that took no part
    in the last call of ``module``. Each decision makes a new object.
    """
    host = host_of(module)
    if host is None:
        return []
    return [cache.outcome for cache in host.owners]


def find_foreign_cache(module: nn.Module) -> str | None:
    """Return the config or hook class name of diffusers' cache on ``module``; None if no such cache is enabled."""
    config: Any = getattr(module, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for part in submodules_of(module):
        registry: Any = part.__dict__.get("_diffusers_hook")
        if registry is None:
            continue
        for hook in registry.hooks.values():
            # Look for hooks too, because apply_first_block_cache(transformer, ...) and similar functions set
            # no _cache_config.
            if type(hook).__module__.rsplit(".", maxsplit=1)[-1] in DIFFUSERS_CACHES:
                return type(hook).__name__
    return None


def check_no_foreign_cache(module: nn.Module) -> None:
    """Raise ``ValueError`` if one of diffusers' own caches is enabled on ``module``."""
    cache = find_foreign_cache(module)
    if cache is not None:
        raise ValueError(
            f"this {type(module).__name__} has a cache of diffusers ({cache}), and two caches would skip the same "
            "blocks. Call disable_cache() of the transformer first; apply_cache_on_pipe(pipe, ...) then is its only "
            "cache."
        )
