"""What stands around the blocks of a model, for the caches that run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from para_core.cache.roles import Role
from para_core.instance import Around, is_wrapped, unwrap, wrap_alike, wrap_method, wrapper

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache

_KEY = "cache"
# Inside of what a plan does at a block: it cuts what the first one is given.
_BLOCK_DEPTH = 1


class Attachment:
    """What stands around the blocks of one model, for whichever cache runs there."""

    def __init__(self, cache: BlockCache) -> None:
        self.module = cache.module
        self.roles = cache.roles
        # Of the call under way, and of calls that no pipeline makes.
        self.running: BlockCache | None = None
        self.resident: BlockCache | None = None
        # Those for which it stands.
        self.owners: WeakSet[BlockCache] = WeakSet()
        # What diffusers' ``cache_context`` calls the branch under way.
        self.branch: str | None = None
        alike: dict[Role, list[nn.Module]] = {}
        for block, role in cache.roles:
            alike.setdefault(role, []).append(block)
        for role, blocks in alike.items():
            wrap_alike(blocks, "__call__", _KEY, self._around_block(role), depth=_BLOCK_DEPTH)
        if hasattr(self.module, "cache_context"):
            wrap_method(self.module, "cache_context", _KEY, self._named)

    def _around_block(self, role: Role) -> Around:
        def run_block(block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            cache = self.running or self.resident
            if cache is None or cache.idle:
                return call(block, *args, **kwargs)
            return cache.run_block(role, block, call, args, kwargs)

        run_block.attachment = self  # type: ignore[attr-defined]
        return run_block

    @contextmanager
    def _named(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        before, resident = self.branch, self.resident
        self.branch = str(args[0] if args else kwargs["name"])
        held = None if resident is None else resident.state
        if resident is not None:
            # For a graph of the whole model, which does not ask for the branch.
            resident.state = resident.state_of(self.branch)
        try:
            with call(module, *args, **kwargs):
                yield
        finally:
            self.branch = before
            if resident is not None and held is not None:
                resident.state = held

    def remove(self) -> None:
        """Give the blocks back as they were."""
        for block, _ in self.roles:
            unwrap(block, _KEY)
        if is_wrapped(self.module, _KEY):
            unwrap(self.module, _KEY)


def attach(cache: BlockCache) -> Attachment:
    """What stands around the blocks of ``cache``'s model: what stood there, if it fits."""
    found = _attachment_at(cache.roles[0][0])
    if found is None or found.roles != cache.roles:
        owners = () if found is None else tuple(found.owners)
        if found is not None:
            found.remove()
        found = Attachment(cache)
        found.owners.update(owners)
    found.owners.add(cache)
    return found


def detach(cache: BlockCache) -> None:
    """Undo :func:`attach`, unless another cache runs on the same model."""
    cache.reset()
    found = _attachment_at(cache.roles[0][0])
    if found is None:
        return
    found.owners.discard(cache)
    if found.resident is cache:
        found.resident = None
    if not found.owners:
        found.remove()


def _attachment_at(block: nn.Module) -> Attachment | None:
    found = getattr(wrapper(block, "__call__", _KEY), "attachment", None)
    return found if isinstance(found, Attachment) else None
