"""Private names of torch that para_core uses, each in one place.

All were read in torch 2.11, 2.13 and 2.15; a comment says where these differ. tests/test_torch_internals.py has a test per name, which
says what breaks without it. Nothing here changes torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

# -- process groups (torch/distributed/distributed_c10d.py)


def process_groups() -> list[ProcessGroup]:
    """Return the process groups that exist in this process, the default one included. ``_world.pg_map`` holds them as its keys."""
    return list(dist.distributed_c10d._world.pg_map)


def is_registered(group: ProcessGroup | None) -> bool:
    """Whether ``group`` exists in this process: it was made by torch.distributed and not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def new_process_group(
    name: str, ranks: Sequence[int], *, description: str, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return a new group of ``ranks`` (ranks of the world, this one among them); only these ranks call this, and find each other by ``name``.

    ``torch.distributed.new_group(use_local_synchronization=True)`` does the same, but chooses the name from the number of groups (2.11,
    2.13) or of calls (2.15) that this process has seen: ranks that differ in it wait for each other for ever. And if the default group has
    a bound device (``init_process_group(device_id=...)``), it makes an NCCL group by ncclCommSplit, which is a collective over all ranks of
    the world. Here the members connect at the first use.

    Args:
        backend: as in ``new_group``; by default that of the default group.
        timeout: by default torch's for the backend.
    """
    c10d: Any = dist.distributed_c10d
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or c10d._get_default_timeout(backend)
    members = sorted(ranks)
    if dist.get_rank() not in members:
        raise ValueError(f"rank {dist.get_rank()} cannot make a group of ranks {members}: it is not one of them.")
    group: ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        store,
        name,
        backend_options=_nccl_options_without_split(backend, timeout),
        timeout=timeout,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def _nccl_options_without_split(backend: str, timeout: timedelta) -> Any:
    """Return options with which torch makes an NCCL group without splitting another one; None for other backends."""
    device_backends = dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if not any(str(name).startswith("nccl") for name in device_backends.values()):
        return None

    class Options(dist.ProcessGroupNCCL.Options):
        # torch 2.11 and 2.13 assign the group to split; the C++ options keep None.
        split_from = property(lambda self: None, lambda self, group: None)

    options = Options()
    options._timeout = timeout
    if hasattr(options, "lazy_init"):
        options.lazy_init = True  # torch 2.15 then looks for no group to split.
    return options


# -- a dispatch key of our own (c10/core/DispatchKey.h, torch/library.py)


class SpareDispatchKey:
    """A dispatch key that no kernel of torch has, whose kernels run in threads and blocks of code that ask for them.

    Nothing is registered before the first use, which registers for the whole process: a fallback, by which all other operators skip the
    key, and ``kernels``. If this build of torch has no such key, or somebody else registered anything under it, the key is not available
    and nothing is registered.

    Args:
        name: of the key.
        kernels: a function per operator (namespace and name), also of operators that are not defined yet.
    """

    def __init__(self, name: str, kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self._name, self._kernels = name, kernels
        self._lock = threading.Lock()
        self._tried = False
        self._key: Any = None
        self._keys: Any = None
        # torch removes what a library registered when the library is deleted.
        self._libraries: list[torch.library.Library] = []

    def is_available(self) -> bool:
        """Register the kernels unless that was tried before; return whether they are registered."""
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._register()
                    self._tried = True
        return self._key is not None

    def _register(self) -> None:
        try:
            key = torch._C._dispatch_key_parse(self._name)
            if torch._C._dispatch_has_backend_fallback(key):
                return
            if torch._C._dispatch_get_registrations_for_dispatch_key(self._name):
                return
            libraries = [fallback := torch.library.Library("_", "IMPL")]
            fallback.fallback(torch.library.fallthrough_kernel, self._name)
            for (namespace, operator), kernel in self._kernels.items():
                libraries.append(library := torch.library.Library(namespace, "IMPL"))
                library.impl(operator, kernel, self._name)
        except (RuntimeError, AttributeError) as error:
            logger.debug("no kernels under the dispatch key %s: %s", self._name, error)
            return
        self._key, self._keys, self._libraries = key, torch._C.DispatchKeySet(key), libraries

    def included(self) -> AbstractContextManager[Any]:
        """Inside, in this thread, the kernels run. Only if the key :meth:`is_available`."""
        guard: AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(self._key)
        return guard

    def excluded(self) -> AbstractContextManager[Any]:
        """Inside, in this thread, the kernels do not run, also inside :meth:`included`. Without registration nothing has to be excluded."""
        if self._key is None:
            return nullcontext()
        guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(self._keys)
        return guard
