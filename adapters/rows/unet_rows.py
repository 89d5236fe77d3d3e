"""A UNet around whose calls rows of the image are sharded over ranks, and gathered again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.applied import PARALLEL_UNET
from para_core.adapters.models.unets import UnetAdapter
from para_core.adapters.rows.groups import RowRanks, on_rows
from para_core.adapters.rows.output import delivered
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import GuidedMesh, one_guided_rank
from para_core.instance_patching import WrapperPriority, original_class, unwrap, wrap_method, wrapper
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import RequireEqual
from para_core.plans.samples import own_samples
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.one_group import dim_groups, one_group
from para_core.torch_internals import pytree
from para_core.user_warnings import ParallelWarning, WarningLog

_KEY = PARALLEL_UNET


class UnetRun:
    """One UNet on the ranks that share its rows, and those that share its samples.

    Args:
        batched: Ranks along ``batch`` share the samples of a call.
        require_equal: Called with the arguments of each call outside :func:`known_equal_unets`; raises if ranks differ.
    """

    def __init__(
        self, unet: nn.Module, adapter: UnetAdapter, mesh: GuidedMesh, batched: bool, require_equal: RequireEqual
    ) -> None:
        self.unet, self.adapter, self.mesh = unet, adapter, mesh
        self.batched, self.require_equal = batched, require_equal
        # Rows are shared by those along the other dims.
        of_rows = replace(one_guided_rank(mesh.sequence.device_type), sequence=mesh.sequence)
        self.rows = RowRanks(one_group(of_rows), dim_groups(of_rows))
        self.parameters = parameters_of(unet)
        # The caller has seen to it that all ranks call alike.
        self.inputs_verified = False
        # Once is enough to say that the samples of a call cannot be shared.
        self.warnings = WarningLog()

    def apply(self) -> None:
        """Run the UNet in rows from now on, in place of what was applied before. Nothing to do on one rank."""
        unshard_unet(self.unet)
        if self.mesh.ranks > 1:
            wrap_method(self.unet, "__call__", _KEY, self.around, order=WrapperPriority.PLAN)

    def remove(self) -> None:
        """Undo :meth:`apply`."""
        unshard_unet(self.unet)

    def around(self, call: Callable[..., Any], unet: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        sample = given.get(self.adapter.images[0])
        if len(args) + len(kwargs) > len(given) or not isinstance(sample, Tensor) or sample.ndim < 4:
            # The model says what is wrong with that.
            return call(unet, *args, **kwargs)
        if not self.inputs_verified:
            self.require_equal(given)
        if sample.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"a gradient of {self.adapter.images[0]} was asked for, and none is computed over ranks. Call the "
                f"{original_class(unet).__name__} under torch.no_grad(), or unparallelize it."
            )
        with torch.no_grad():
            total = sample.shape[0]
            shared = self.shares_samples(total)
            if shared:
                given = {name: own_samples(value, 0, total, self.mesh.batch) for name, value in given.items()}
            out = self.over_rows(partial(call, unet), unet, given)
            return self.all_samples(out, total) if shared else out

    def over_rows(self, call: Callable[..., Any], unet: Any, given: dict[str, Any]) -> Any:
        """``call(**given)`` on this rank's rows, gathered."""
        sample = given[self.adapter.images[0]]
        dim = -1 if sample.shape[-1] > sample.shape[-2] else -2
        unit = 2 ** sum(getattr(block, "downsamplers", None) is not None for block in unet.down_blocks)
        # One row of the innermost level, and it could not be told from a dim of size 1.
        rows, workers = self.rows.share(sample, dim, unit, least=2)
        if workers.size == 1:
            compute = partial(call, **given)
        else:
            sharded: dict[str | int, Any] = {}
            for name in self.adapter.images:
                times, rest = divmod(given[name].shape[dim], sample.shape[dim])
                if rest == 0 and times > 0:
                    sharded[name] = (dim, tuple([times * count for count in rows.layout]))
            compute = partial(on_rows, SpatialShardMode(workers), call, (), given, sharded)
        return delivered(compute, workers.size, self.rows.ranks, self.rows.mesh, "all")

    def shares_samples(self, total: int) -> bool:
        size = self.mesh.batch.size
        if size == 1 or not self.batched:
            return False
        if total % size == 0:
            return True
        self.warnings.warn(
            "batch",
            f"a call has {total} sample(s), which {size} ranks along 'batch' cannot share: all compute all of them. Guide, or "
            "give these ranks to the rows.",
            ParallelWarning,
        )
        return False

    def all_samples(self, out: Any, total: int) -> Any:
        sizes = [total // self.mesh.batch.size] * self.mesh.batch.size
        return pytree.tree_map_only(Tensor, lambda x: all_gather(x, sizes, 0, self.mesh.batch).contiguous(), out)


def unshard_unet(unet: nn.Module) -> None:
    """Run ``unet`` as before :meth:`UnetRun.apply`."""
    unwrap(unet, _KEY)


@contextmanager
def known_equal_unets(unets: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, ``unets`` are called alike on all ranks, so their calls do not ask."""
    with ExitStack() as stack:
        for unet in unets:
            run = _run_of(unet)
            if run is not None:
                stack.callback(setattr, run, "inputs_verified", run.inputs_verified)
                run.inputs_verified = True
        yield


def _run_of(unet: Any) -> UnetRun | None:
    run = getattr(wrapper(unet, "__call__", _KEY), "__self__", None)
    return run if isinstance(run, UnetRun) else None
