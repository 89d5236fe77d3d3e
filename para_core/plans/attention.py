"""The mode inside a plan's region: it takes the layout of each attention call from what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from para_core.attention.tiling import RotateMethod
from para_core.layout import Segment, SequenceLayout
from para_core.mesh import SequenceMesh
from para_core.modes.known_sequences import HeldLayout, segments_of
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.plan import Attention
from para_core.tokens import gather_tokens


class PlannedAttnMode(UnifiedAttnMode):
    """Intercepts nothing until tokens were cut (``active``).

    Args:
        attending: what the first, second, … attention call consists of; the last stands for all further ones.
        encoders: whether the model has modules with fused kernels of torch, which are to be switched off. Else the switch is
            left alone: what is set behind ``torch.cond`` is lost in Dynamo 2.13, and it would stay off.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        attending: tuple[Attention, ...],
        rotate_method: RotateMethod,
        *,
        encoders: bool = False,
    ) -> None:
        super().__init__(mesh, assume_equal=True, rotate_method=rotate_method)
        self._encoders = encoders
        self._attending = attending
        self._rotate_method = rotate_method
        self._calls = 0
        self._segments: HeldLayout = ()
        self._active[0] = False

    def _begin(self) -> None:
        self._fast_path = False
        if self._encoders:
            super()._begin()

    def switch(self, on: bool) -> None:
        """Intercept from here on, or no longer."""
        self._active[0] = on

    def set_segments(self, segments: tuple[Segment, ...]) -> None:
        """What is known of the call under way: which segments were cut, and which are whole on every rank."""
        self._segments = tuple([self._hold_segment(segment) for segment in segments])

    @contextmanager
    def attending_to(self, attending: tuple[Attention, ...]) -> Iterator[None]:
        """Inside, attention calls consist of this; they are counted anew.

        Under a mode of its own, which goes before this one: a branch of ``torch.cond`` may change nothing from outside.
        """
        inner = PlannedAttnMode(self._mesh, attending, self._rotate_method)
        inner._segments = self._segments
        inner._active[0] = self._active[0]
        with inner:
            yield
        if inner.intercepted:
            self.intercepted = True

    def _check_use(self) -> None:
        """The region asks, also while it is traced."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attention = self._attending[min(self._calls, len(self._attending) - 1)]
        if len(self._attending) > 1:
            self._calls += 1
        cut = [segment.name for segment in segments_of(self._segments) if not segment.replicated]
        if not set(cut) & set(attention.keys or attention.queries):
            with UnifiedAttnMode.disable():
                return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is None or attention.mask is None:
            return super().attend(query, key, value, *args, **kwargs)
        if attention.mask == "keys":
            _, key_layout = self._layouts(query.shape[-2], key.shape[-2], ordered=True)
            kwargs["attn_mask"] = gather_tokens(mask, -1, key_layout, self._mesh)
            return super().attend(query, key, value, *args, **kwargs)
        valid = mask.diagonal(dim1=-2, dim2=-1)
        kwargs["attn_mask"] = valid[..., None, :]
        # A row that sees nothing is zero.
        return super().attend(query, key, value, *args, **kwargs).masked_fill(~valid[..., None], 0.0)

    def _layouts(self, num_queries: int, num_keys: int, *, ordered: bool) -> tuple[SequenceLayout, SequenceLayout]:
        attention = self._attending[min(max(self._calls - 1, 0), len(self._attending) - 1)]
        query_layout = self._layout_of(attention.queries, num_queries, "query")
        if attention.keys is not None:
            return query_layout, self._layout_of(attention.keys, num_keys, "key")
        if guard_or_false(num_keys != num_queries):
            raise ValueError(
                f"an attention call has {num_queries} queries and {num_keys} keys on this rank; the plan takes both to be "
                f"{' + '.join(attention.queries)}. Say in Plan.attention what the module that makes it attends to."
            )
        return query_layout, query_layout

    def _layout_of(self, names: tuple[str, ...], held: int, kind: str) -> SequenceLayout:
        known = {segment.name: segment for segment in segments_of(self._segments)}
        local = sum([known[name].size(self._mesh.rank, self._mesh.ranks) for name in names if name in known])
        # What is left is of the one segment that was never cut.
        rest = held - local
        unknown = [name for name in names if name not in known]
        # Of a length that depends on data nothing is known while tracing.
        if guard_or_false(rest < 0 if len(unknown) == 1 else rest != 0):
            raise ValueError(
                f"{kind} has {held} tokens on this rank; of {' + '.join(names)} it holds {local}. The plan does not fit what "
                "the model does: say in Plan.attention what the module that makes this call attends to."
            )
        segments = [known[name] if name in known else Segment(name, rest, replicated=True) for name in names]
        return SequenceLayout(tuple(segments), self._mesh.ranks)


@contextmanager
def recomputed_under(mode: PlannedAttnMode, module: nn.Module) -> Iterator[None]:
    """Inside, what diffusers' activation checkpointing will run again in the backward will do so under ``mode``.

    While a graph is traced nothing is to be done: it holds its own recomputation.
    """
    checkpointing: list[tuple[Any, Any]] = []
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        checkpointing = [
            (submodule, submodule._gradient_checkpointing_func)
            for submodule in module.modules()
            if getattr(submodule, "gradient_checkpointing", False)
        ]
    for submodule, checkpoint in checkpointing:
        submodule._gradient_checkpointing_func = _bind_first(mode, checkpoint)
    try:
        yield
    finally:
        for submodule, checkpoint in checkpointing:
            submodule._gradient_checkpointing_func = checkpoint


def _bind_first(mode: PlannedAttnMode, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args: checkpoint(mode.bound(function), *args)
