"""Run ``torch.nn.attention.flex_attention.flex_attention`` over a mesh.

A mode cannot intercept ``flex_attention`` itself, but only the operator that this function calls,
``FlexAttentionHOP``. The mode sees each call of the operator twice, while Dynamo traces and when the graph
runs:

- In eager code ``flex_attention`` compiles a graph that contains only the operator, and runs it. While Dynamo
  traces, the mode only stores the layout ids of a sharded mask in the graph. When the graph runs, the mode
  computes attention over the mesh.
- Inside a function that the user compiled, the mode lets Dynamo trace the computation over the mesh. When
  that graph runs, the mode calls the operator unchanged.

The mode distinguishes the two cases by the Python stack, which has a frame of ``flex_attention`` only in
eager code.

A feature of :mod:`.registry`. Masks are sharded in :mod:`.block_masks`, and tokens exchanged for heads in
:mod:`para_core.attention.flex_exchange`. Tests: tests/modes/test_flex_attention.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.call_agreement import difference_of_lengths
from para_core.attention.flex_exchange import enter, leave, query_rows
from para_core.attention.local import add_autograd_dependency
from para_core.attention.mesh_attention import ChooseLayouts
from para_core.attention.spec import AttentionSpec, mesh_of_call
from para_core.distributed.agree import agree
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.records import Signature
from para_core.foreign_errors import mask_length_mismatch
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.modes.block_masks import (
    ShardedMaskMod,
    has_no_blocks,
    layout_id,
    placement_of,
    position_of_row,
    shard_block_mask,
)
from para_core.modes.flex_errors import NOT_SHARDED, OTHER_SEQUENCE, raise_in_graph
from para_core.modes.flex_users import uses_flex_attention
from para_core.modes.registry import (
    AttentionOwner,
    register_explanation,
    register_function,
    register_mask,
    register_needs_mode,
)
from para_core.torch_internals import DisableTorchFunction, flex_attention_operator

_OPTIONS = AttnOptions()
_OPTIONS_TEXT = _OPTIONS.as_text()


class _FlexCall(NamedTuple):
    """The arguments of the operator of ``flex_attention``, in its order.

    ``mask`` is :meth:`BlockMask.as_tuple`: the lengths of queries and keys, the tensors of blocks, the block
    sizes of queries and of keys, and the ``mask_mod``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    mask: tuple[Any, ...]
    scale: float
    kernel_options: dict[str, Any]
    score_buffers: tuple[Any, ...] = ()
    mask_buffers: tuple[Any, ...] = ()


class FlexOverMesh:
    """A callable that computes the operator of ``flex_attention`` over a mesh.

    Args:
        layouts: A function ``(local query length, local key length, whether positions matter) -> (query
            layout, key layout)``.
        options: The options of the mode. If one of them selects keys (``block_mask``, ``kept_keys``), every
            call raises RuntimeError.
        assume_equal: Whether to skip the exchange before a call in eager code, as in
            :class:`~para_core.modes.unified.UnifiedAttnMode`.
    """

    def __init__(
        self, mesh: SequenceMesh, layouts: ChooseLayouts, options: AttnOptions, *, assume_equal: bool
    ) -> None:
        self._mesh = mesh
        self._layouts = layouts
        self._assume_equal = assume_equal
        self._chooses_keys = options.by_position

    def __call__(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Return the operator's results for this rank's queries. Collective, except where it calls the
        operator unchanged.

        Returns:
            The output ``[B, H, S_local, D]``, and the log-sum-exp and the maximum scores, both ``[B, H,
            S_local]``. The last two are uninitialized if the operator's ``kernel_options`` do not request
            them.

        Raises:
            ValueError: The mask was not sharded or belongs to another sequence, or the arguments are invalid.
            RuntimeError: An option of the mode selects keys.
        """
        in_eager_code = called_in_eager_code()
        if torch.compiler.is_compiling():
            if in_eager_code:
                return operator(*_store_layout_ids(args), **kwargs)
            return self._trace(operator, _FlexCall(*args, **kwargs))
        if in_eager_code:
            return self._run(operator, _FlexCall(*_store_layout_ids(args), **kwargs))
        return operator(*args, **kwargs)

    def _run(self, operator: Callable[..., Any], call: _FlexCall) -> Any:
        """Return the results of a call in eager code, after the ranks have compared their calls. Collective."""
        exchanges = not self._assume_equal
        if exchanges:
            self._mesh.check_alive()
        try:
            call, plan = self._plan(call)
        except (TypeError, ValueError, RuntimeError) as error:
            self._raise_everywhere(error)
        self._check_mask(call.mask, plan)
        if exchanges:
            agree(_call_signature(call, plan), self._mesh, explain=difference_of_lengths)
        return _compute_over_mesh(operator, call, plan)

    def _raise_everywhere(self, error: Exception) -> NoReturn:
        """Raise ``error`` on all ranks, which meet at the exchange before the call; with ``assume_equal`` here only."""
        if not self._assume_equal:
            agree(error, self._mesh)
        raise error

    def _check_mask(self, mask: tuple[Any, ...], plan: AttentionPlan) -> None:
        """Raise ``ValueError`` unless the mask of a call in eager code was sharded for the layouts of ``plan``."""
        query_layout, key_layout = plan.spec.query_layout, plan.spec.key_layout
        if has_no_blocks(*mask[-3:-1]) or not (query_layout.sharded or key_layout.sharded):
            return
        lengths = query_layout.total, key_layout.total
        if mask[0] >= 0:
            error = ValueError(NOT_SHARDED.format(mask[0], mask[1], *lengths))
            if (mask[0], mask[1]) == lengths:
                # This rank holds all tokens, so flex_attention accepted the unsharded mask here. On the other
                # ranks flex_attention has already raised, so an exchange with them would hang.
                raise error
            self._raise_everywhere(error)
        expected = -1 - layout_id(query_layout), -1 - layout_id(key_layout)
        if (mask[0], mask[1]) != expected:
            self._raise_everywhere(ValueError(OTHER_SEQUENCE.format(*lengths)))

    def _trace(self, operator: Callable[..., Any], call: _FlexCall) -> Any:
        """Return the results of a call in a function that the user compiles, where errors are raised in the graph."""
        call, plan = self._plan(call)
        query_layout, key_layout = plan.spec.query_layout, plan.spec.key_layout
        if not has_no_blocks(*call.mask[-3:-1]) and (query_layout.sharded or key_layout.sharded):
            mod = call.mask[-1]
            lengths = [query_layout.total, key_layout.total]
            if not isinstance(mod, ShardedMaskMod):
                return raise_in_graph(
                    call.query, call.value, NOT_SHARDED, [call.mask[0], call.mask[1], *lengths]
                )
            if not (
                _are_equal_layouts(mod.query_layout, query_layout)
                and _are_equal_layouts(mod.key_layout, key_layout)
            ):
                return raise_in_graph(call.query, call.value, OTHER_SEQUENCE, lengths)
            call = _with_mask(call, (*call.mask[:-1], mod.local_mask_mod))
        return _compute_over_mesh(operator, call, plan)

    def _plan(self, call: _FlexCall) -> tuple[_FlexCall, AttentionPlan]:
        """Return ``call`` with key and value expanded to the batch size of the query, and the plan of the call."""
        query, key, value = call.query, call.key, call.value
        if self._chooses_keys:
            raise RuntimeError(
                "flex_attention under attention that chooses keys itself (BlockSparseAttnMode, SparseKVAttnMode or "
                "KeptKeys): only one of both can say what a query sees. Use UnifiedAttnMode, or run this call under "
                "UnifiedAttnMode.disable()."
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                f"query, key and value of flex_attention over several ranks must have one dtype; got {query.dtype}, "
                f"{key.dtype} and {value.dtype}."
            )
        if key.shape[0] != query.shape[0]:
            key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
        query_layout, key_layout = self._layouts(query.shape[2], key.shape[2], True)
        mesh = mesh_of_call(self._mesh, key_layout, _OPTIONS)
        spec = AttentionSpec(
            query_layout,
            key_layout,
            mesh,
            query.shape[1],
            key.shape[1],
            options=_OPTIONS,
            options_text=_OPTIONS_TEXT,
        )
        return _FlexCall(query, key, value, *call[3:]), AttentionPlan(spec)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def called_in_eager_code() -> bool:
    """Whether the operator is called by ``flex_attention`` in eager code, and not by a graph that the user
    compiled.

    Only in eager code does the stack of this thread have a frame of ``flex_attention``.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is flex_attention.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _store_layout_ids(args: Sequence[Any]) -> Sequence[Any]:
    """Return the operator's arguments ``args``. In a sharded mask, replace the ``mask_mod`` by its
    ``local_mask_mod``, and the two lengths by ``-1 - layout_id``. A traced graph stores the lengths, but no
    attributes of a ``mask_mod``, so at run time only the lengths can tell for which layouts the mask was
    sharded.
    """
    mask = args[4]
    mod = mask[-1]
    if not isinstance(mod, ShardedMaskMod):
        return args
    query_id, key_id = mod.layout_ids
    return (*args[:4], (-1 - query_id, -1 - key_id, *mask[2:-1], mod.local_mask_mod), *args[5:])


def _with_mask(call: _FlexCall, mask: tuple[Any, ...]) -> _FlexCall:
    """Return ``call`` with another mask. Not by ``_replace``, which Dynamo of torch 2.11 cannot trace."""
    return _FlexCall(*call[:4], mask, *call[5:])


def _are_equal_layouts(layout: SequenceLayout, other: SequenceLayout) -> bool:
    """Whether two layouts place the same tokens on each rank. Dynamo can trace this with symbolic lengths."""
    placements, others = placement_of(layout), placement_of(other)
    return len(placements) == len(others) and all(a == b for a, b in zip(placements, others, strict=True))


def _compute_over_mesh(operator: Callable[..., Any], call: _FlexCall, plan: AttentionPlan) -> Any:
    """Return the results of the operator for this rank's queries: exchange tokens for heads, run the operator
    on this rank's heads, and exchange its results back. A collective.
    """
    query, key, value = enter(call.query, call.key, call.value, plan)
    out, *stats = _run_on_heads(operator, call, plan, query, key, value)
    out = leave(out, plan)
    local_stats = []
    for stat, wanted in zip(stats, _wanted_stats(call), strict=True):
        if wanted:
            local_stats.append(leave(stat[..., None], plan)[..., 0].contiguous())
        else:
            local_stats.append(stat.new_empty(call.query.shape[0], plan.spec.num_heads, call.query.shape[2]))
    # Like flex_attention, return the output with the memory order of the query: token by token, or head by
    # head.
    is_by_token = call.query.stride(1) < call.query.stride(2)
    if not is_by_token:
        out = out.contiguous()
    return (out, *local_stats)


def _wanted_stats(call: _FlexCall) -> tuple[bool, bool]:
    """Return whether the call requests the log-sum-exp, and the maximum scores: each is one more exchange."""
    options = call.kernel_options
    return bool(options.get("OUTPUT_LOGSUMEXP", True)), bool(options.get("OUTPUT_MAX", False))


def _run_on_heads(
    operator: Callable[..., Any],
    call: _FlexCall,
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Any:
    """Return the results of the operator for the heads and rows that :func:`enter` gave this rank.

    ``query`` is ``[B, H_local, S_rows, D]``, ``key`` and ``value`` ``[B, H_key_local, S_keys, D]`` with all
    keys: those of ``call`` are this rank's tokens before the exchange.
    """
    spec = plan.spec
    ulysses = spec.mesh.ulysses
    first_head, heads = Segment("heads", spec.num_heads).runs(ulysses.index, ulysses.size)[0]
    if heads == 0 or query.shape[2] == 0 or key.shape[2] == 0:
        # Give zeros, and -inf as lse and as maxima. The zeros have an autograd graph that leads to the
        # inputs, whose gradients are 0.
        zeros = query.new_zeros(*query.shape[:3], value.shape[3])
        stat = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
        return add_autograd_dependency(zeros, [query, key, value]), stat, stat.clone()
    key_of_query_heads = plan.heads.key_of_each_query(ulysses.index, key.device)
    if key_of_query_heads is not None:
        key = key.index_select(1, key_of_query_heads)
        value = value.index_select(1, key_of_query_heads)
    user_score_mod = call.score_mod
    buffers: tuple[Any, ...] = ()
    if call.score_buffers or call.mask_buffers:
        buffers = (call.score_buffers, call.mask_buffers)
    position = position_of_row(query_rows(spec.query_layout, spec.mesh), query.device)

    # The user's function gets the index of the head among all heads, and that of the query in the sequence.
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        return user_score_mod(score, b, h + first_head, position(q), k, *tensors)

    mask = _mask_of_heads(call.mask, first_head, heads, position, query.shape[2], spec.key_layout.total)
    # Outer modes must not see the operator, because they would distribute its heads over the ranks again.
    with DisableTorchFunction():
        return operator(query, key, value, score_mod, mask, call.scale, call.kernel_options, *buffers)


def _mask_of_heads(
    mask: tuple[Any, ...],
    first_head: int,
    heads: int,
    position: Callable[[Tensor], Tensor],
    num_rows: int,
    num_keys: int,
) -> tuple[Any, ...]:
    """Return the operator's ``mask`` argument for ``heads`` heads from ``first_head`` on, for the
    ``num_rows`` query rows of this rank, whose :func:`position_of_row` is ``position``, and for all
    ``num_keys`` keys.
    """
    *tensors, row_block, key_block, mask_mod = mask[2:]
    for index, x in enumerate(tensors):
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] > 1:
            tensors[index] = x.narrow(1, first_head, heads)
    no_blocks = has_no_blocks(row_block, key_block)

    def shifted_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *buffers: Tensor) -> Tensor:
        if no_blocks:
            q = position(q)
        out: Tensor = mask_mod(b, h + first_head, q, k, *buffers)
        return out

    if no_blocks:
        return (*mask[:2], *tensors, row_block, key_block, shifted_mod)
    if first_head:
        return (num_rows, num_keys, *tensors, row_block, key_block, shifted_mod)
    return (num_rows, num_keys, *tensors, row_block, key_block, mask_mod)


def _call_signature(call: _FlexCall, plan: AttentionPlan) -> Any:
    """Return what must be equal on all ranks, by the words of the error if it is not."""
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    block_mask: str | list[Any] = "none"
    if not has_no_blocks(*call.mask[-3:-1]):
        block_mask = [*call.mask[:2], call.mask[-3], call.mask[-2]]
    return Signature.of(
        {
            "operator": "flex_attention",
            **{f"{name} without its length": [*x.shape[:2], x.shape[3]] for name, x in tensors.items()},
            "query lengths per rank": plan.spec.query_layout.sizes(),
            "key lengths per rank": plan.spec.key_layout.sizes(),
            "dtype": str(call.query.dtype),
            "device type": call.query.device.type,
            "scale": call.scale,
            "block_mask": block_mask,
            "outputs": _wanted_stats(call),
            "requires_grad": [torch.is_grad_enabled() and x.requires_grad for x in tensors.values()],
        }
    )


def explain_unsharded_mask(error: BaseException | None) -> None:
    """Raise a ValueError that recommends ``cp.shard(block_mask)`` if ``error`` is a length mismatch of a
    mask, which ``flex_attention`` raises for an unsharded mask before any mode sees the call.
    """
    # Without an error there is no message to search. Dynamo traces this function if a mode is left inside a
    # graph, and in torch 2.11 it could not trace a search in a string.
    if error is None:
        return
    mismatch = mask_length_mismatch(error)
    if mismatch is not None:
        raise ValueError(
            f"{mismatch}: the query and the key are those of this rank. On several ranks each holds a part of the "
            "tokens: make the mask over all tokens, and pass cp.shard(block_mask), or name it in the plan, "
            "SplitMask((segment,))."
        ) from error


def _route_flex(owner: AttentionOwner, operator: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Compute a call of the operator of ``flex_attention`` for ``owner``."""
    # While Dynamo traces the graph of a call in eager code, the call is only prepared: it comes again when
    # that runs.
    is_prepared = torch.compiler.is_compiling() and called_in_eager_code()
    access = owner.begin_other_call(counts=not is_prepared)
    if access is None:
        return operator(*args, **kwargs)
    flex = FlexOverMesh(access.mesh, access.layouts, access.options, assume_equal=access.assume_equal)
    return flex(operator, args, kwargs)


register_function(flex_attention_operator, _route_flex)
register_mask(BlockMask, shard_block_mask)
register_needs_mode(uses_flex_attention)
register_explanation(explain_unsharded_mask)
