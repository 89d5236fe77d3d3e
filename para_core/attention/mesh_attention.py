"""``scaled_dot_product_attention`` over a mesh: validate a call, compare it between ranks, and compute it.

:class:`~para_core.modes.unified.UnifiedAttnMode` and the plans (:mod:`para_core.plans.planned_attention`)
call it for each intercepted call. This file computes nothing: :mod:`.usp` does. Tests:
tests/attention/test_inputs.py for what is accepted and refused, test_exactness.py there for results,
test_launches.py for the time of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.backend_selection import check_some_backend, computes_in_float32
from para_core.attention.backends.pytorch import SWITCHES
from para_core.attention.blocks import check_attn_func, run_attn_func
from para_core.attention.call_agreement import (
    NO_MASK,
    MaskRecord,
    call_signature,
    describe_mask,
    explain_difference,
    settle_masks,
    warn_of_single_tokens,
)
from para_core.attention.local import AttnFunc
from para_core.attention.mask_rows import copy_mark
from para_core.attention.masks import MaskExtents, infer_mask_extents, mask_of_block
from para_core.attention.operator import differentiable_usp
from para_core.attention.sdpa_call import SdpaCall, check_arguments, check_kind, check_transforms
from para_core.attention.spec import AttentionSpec, mesh_of_call
from para_core.attention.usp import attend_over_mesh, autocasts, usp_forward
from para_core.distributed.agree import HostGroups, agree
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.records import Signature
from para_core.layout.sequence import SequenceLayout
from para_core.torch_internals import (
    FORWARD_AD_LEVEL,
    forward_ad_globals,
    innermost_transform,
    is_any_autocast_enabled,
    math_sdp_enabled,
)

# Called as choose(local query length, local key length, whether positions matter); returns the layouts of
# queries and of keys. Positions matter to a call that is causal, has a mask, or has an option such as a block
# mask.
ChooseLayouts = Callable[[int, int, bool], tuple[SequenceLayout, SequenceLayout]]

# The caches of one MeshAttention have at most these numbers of entries, so that a program whose lengths never
# repeat does not fill the memory. A full cache is emptied.
_MOST_SIGNATURES = 1024
_MOST_STATES = 64


@dataclass(frozen=True)
class _Prepared:
    """The cached result of validating and planning a call, for all calls with the same shapes and flags.

    ``signature`` is None if the ranks do not compare calls. ``extents`` is None without a mask, and if ranks
    exchange the sizes of their masks in each call.
    """

    plan: AttentionPlan
    signature: Signature | None
    extents: MaskExtents | None


class MeshAttention:
    """``scaled_dot_product_attention`` over a mesh, as a callable. Each rank calls it with its part of the
    tensors.

    In eager code, validation and planning are cached for calls with the same shapes and flags.

    Args:
        mesh: The ranks that share the sequence.
        layouts: Returns the layouts of queries and keys. Results are cached for each state that
            :meth:`switch_cache` sets, so they must not depend on anything else.
        options: The options of all calls.
        assume_equal: Whether to skip the exchange at the start of each call. Invalid input on one rank may
            then hang or abort the other ranks.
        attn_func: Computes local attention in place of SDPA, if it is not None.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        layouts: ChooseLayouts,
        options: AttnOptions,
        *,
        assume_equal: bool,
        attn_func: AttnFunc | None = None,
    ) -> None:
        self._mesh, self._layouts, self._options = mesh, layouts, options
        self._assume_equal, self._attn_func = assume_equal, attn_func
        self._options_text = options.as_text()
        # Whether the user's switches allow the backend that the options name; None if it has no switch.
        self._is_backend_on: Callable[[], bool] | None = None
        if options.backend is not None:
            self._is_backend_on = SWITCHES.get(options.backend)
        self._host_groups = HostGroups(mesh)
        # The cache of the current state, and those of all states: see switch_cache(). Keys are those of
        # _lookup_key().
        self._prepared: dict[Any, _Prepared] = {}
        self._prepared_in: dict[Any, dict[Any, _Prepared]] = {}

    def switch_cache(self, state: Any) -> None:
        """Switch to the cache of plans for ``state``, a hashable value that determines the results of
        ``layouts``.

        Without a call of this function nothing but the shapes and flags of a call may determine them.
        """
        if len(self._prepared_in) >= _MOST_STATES:
            self._prepared_in.clear()
        self._prepared = self._prepared_in.setdefault(state, {})

    def __call__(self, call: SdpaCall) -> Tensor:
        """Return the attention output of this rank's queries over all keys, with the memory layout of SDPA's
        result.

        The tensors of ``call`` are ``[B, H, S_local, D]``, or have any leading dims that SDPA accepts. At
        most one of the last two dims of the mask may cover this rank's tokens only.

        Collective, in eager code also if a rank finds its input invalid.

        Raises:
            TypeError, ValueError, RuntimeError: The input of some rank is invalid. In eager code every rank
                raises, unless ``assume_equal`` is set. Inside a torch.func transform that is not supported
                only the ranks raise that are inside it.
        """
        # Ask once, and pass the answer on: each question costs the host two Python calls.
        is_traced = torch.compiler.is_compiling()
        # Test here whether check_transforms() could raise, which is rare, to save a function call.
        if is_traced or innermost_transform() is not None or forward_ad_globals[FORWARD_AD_LEVEL] >= 0:
            check_transforms()
        is_cast = (is_traced or is_any_autocast_enabled()) and autocasts(call.query)
        try:
            call = _normalize(call, is_cast=is_cast)
        except TypeError as error:
            self.raise_everywhere(error)
        query, key, value, mask = call.query, call.key, call.value, call.attn_mask
        if torch.is_grad_enabled() and self._needs_float32(query, key, value, mask):
            with torch.autocast(query.device.type, enabled=False):
                wide = call.with_tensors(query.float(), key.float(), value.float(), mask)
                return self(wide).to(query.dtype)
        # The switches are not part of the key. With a backend switched off, _prepare() raises on every rank;
        # later only ranks that have something to compute would.
        lookup_key = None
        if not is_traced and (self._is_backend_on is None or self._is_backend_on()):
            lookup_key = _lookup_key(call)
        prepared = None
        if lookup_key is not None:
            prepared = self._prepared.get(lookup_key)
        if prepared is None:
            try:
                check_kind(query, key, value, mask)
            except TypeError as error:
                self.raise_everywhere(error)
            if query.ndim == key.ndim == value.ndim == 2:
                return self(call.with_tensors(query[None], key[None], value[None], mask))[0]
            expanded = call.expanded()
            if expanded is not None:
                return self(expanded)
            prepared = self._prepare(call, lookup_key)
        plan, extents = prepared.plan, prepared.extents
        if prepared.signature is not None:
            mask, extents = self._agree(plan.spec, prepared.signature, query, mask)
        if query.ndim == 4:
            return self._compute(query, key, value, mask, plan, extents, is_traced, is_cast)
        of_one_batch = _in_one_batch(query, key, value, mask)
        out = self._compute(*of_one_batch, plan, extents, is_traced, is_cast)
        return out.reshape(*query.shape[:-3], *out.shape[1:])

    def _needs_float32(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """Whether a single device would compute this 16-bit call and its gradient in float32. Several ranks
        then do the same: with partial results rounded to 16 bits, gradients that nearly cancel would be lost.
        """
        tensors = [query, key, value]
        if mask is not None:
            tensors.append(mask)
        if self._attn_func is not None or any(not isinstance(x, Tensor) or x.is_nested for x in tensors):
            return False
        if not any(x.requires_grad for x in tensors):
            return False
        return computes_in_float32(query, value, mask, self._options.with_gradients.backend)

    def _agree(
        self, spec: AttentionSpec, signature: Signature, query: Tensor, mask: Tensor | None
    ) -> tuple[Tensor | None, MaskExtents | None]:
        """Raise on all ranks unless their calls have the same ``signature`` and masks that fit together.
        Collective.

        Return the mask to use and the extents of its dims.
        """
        mask_record = NO_MASK
        if mask is not None:
            mask_record = describe_mask(spec, self._mesh, query, mask)
        explain = partial(explain_difference, self._mesh, mask)
        of_ranks = agree(signature, self._host_groups, mask_record, explain=explain, call="an attention call")
        if of_ranks.count(NO_MASK) == len(of_ranks):
            return None, None
        return settle_masks(spec, self._mesh, query, mask, [MaskRecord(*numbers) for numbers in of_ranks])

    def _prepare(self, call: SdpaCall, lookup_key: Any) -> _Prepared:
        """Validate and plan a call by its shapes and flags, and cache the result under ``lookup_key`` unless
        that is None. Raises as :meth:`__call__` does; it is collective only if it raises.
        """
        exchanges = not (self._assume_equal or torch.compiler.is_compiling())
        if exchanges:
            self._mesh.check_alive()
        try:
            spec = self._specify(call)
        except (TypeError, ValueError, RuntimeError) as error:
            self.raise_everywhere(error)
        signature, extents = None, None
        if exchanges:
            learns = self._attn_func is not None and torch.is_grad_enabled()
            signature = call_signature(call.query, call.key, call.value, spec, attn_func_learns=learns)
            warn_of_single_tokens(spec)
        elif call.attn_mask is not None:
            rows, columns = call.attn_mask.shape[-2:]
            ranks = [self._mesh.rank]
            extents = infer_mask_extents([(rows, columns)], spec.query_layout, spec.key_layout, ranks)
        prepared = _Prepared(AttentionPlan(spec, one_shape=True), signature, extents)
        if lookup_key is not None:
            if len(self._prepared) >= _MOST_SIGNATURES:
                self._prepared.clear()
            self._prepared[lookup_key] = prepared
        return prepared

    def _specify(self, call: SdpaCall) -> AttentionSpec:
        """Return the specification of a call, without communication. Raise ``TypeError``, ``ValueError`` or
        ``RuntimeError`` if the call is invalid on this rank.
        """
        query, key, value, mask, options = call.query, call.key, call.value, call.attn_mask, self._options
        check_arguments(query, key, value, mask, call.dropout_p, call.enable_gqa)
        if self._attn_func is None:
            check_some_backend(query, value, mask=mask, backend=options.backend)
        else:
            check_attn_func(self._attn_func, call, self._mesh, options)
        ordered = call.is_causal or mask is not None or options.by_position
        query_layout, key_layout = self._layouts(query.shape[-2], key.shape[-2], ordered)
        if call.lengths is not None:
            call.lengths.check(query_layout.total, key_layout.total)
        for other in options.others:
            other.check_lengths(query_layout.total, key_layout.total)
        return AttentionSpec(
            query_layout,
            key_layout,
            mesh_of_call(self._mesh, key_layout, options),
            query.shape[-3],
            key.shape[-3],
            is_causal=call.is_causal,
            scale=call.scale,
            options=options,
            options_text=self._options_text,
        )

    def raise_everywhere(self, error: Exception) -> NoReturn:
        """Raise ``error``. In eager code every rank raises it, unless ``assume_equal`` is set: the others get
        it in the exchange at the start of their call. So call this only in place of that exchange.
        """
        if not (self._assume_equal or torch.compiler.is_compiling()):
            self._mesh.check_alive()
            agree(error, self._mesh)
        raise error

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        plan: AttentionPlan,
        extents: MaskExtents | None,
        is_traced: bool,
        is_cast: bool,
    ) -> Tensor:
        """Compute a validated call with 4-D tensors. ``is_cast`` says whether autocast is on, and has cast
        them. Collective. ``extents`` are None if no rank has a mask.
        """
        if query.is_meta:
            # For meta tensors only the shape of the result is needed, so nothing is sent.
            shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            return query.new_empty(shape).transpose(1, 2)
        mask = None
        if attn_mask is not None and extents is not None:
            mask = mask_of_block(attn_mask[(None,) * (4 - attn_mask.ndim)], extents, plan)
        if self._attn_func is not None:
            attn_func = partial(run_attn_func, self._attn_func)
            return usp_forward(plan, query, key, value, mask, attn_func=attn_func)[0]
        if is_traced or torch.is_grad_enabled():
            return differentiable_usp(plan, query, key, value, mask)
        if is_cast:
            return usp_forward(plan, query, key, value, mask)[0]
        return attend_over_mesh(plan, query, key, value, mask)[0]


def _normalize(call: SdpaCall, *, is_cast: bool) -> SdpaCall:
    """Return ``call`` in a canonical form: with ``is_cast`` cast as autocast would for SDPA, with
    ``is_causal`` and ``scale`` as plain Python values, with a mask of at least two dims, and with one row of
    a mask that expands one row to all queries. Raise ``TypeError`` if the scale is no number.
    """
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, lengths = call
    if is_cast:
        # Cast here, because autocast casts the arguments of SDPA, but not those of the operators used in its
        # place.
        query, key, value, mask = [_cast_for_autocast(x) for x in call[:4]]
        copy_mark(call.attn_mask, mask)
    elif (
        mask is None
        and (is_causal is False or is_causal is True)
        and (scale is None or isinstance(scale, (float, torch.SymFloat)))
    ):
        return call
    if not (scale is None or isinstance(scale, (float, torch.SymFloat))):
        scale = _as_float(scale)
    # A mask that is no dense tensor is refused later, on every rank.
    if isinstance(mask, Tensor) and mask.layout == torch.strided and not mask.is_nested:
        if mask.ndim < 2:
            mask = mask[(None,) * (2 - mask.ndim)]
        expands_one_row = guard_or_false(mask.stride(-2) == 0 and mask.shape[-2] > 1)
        if expands_one_row:
            mask = mask[..., :1, :]
    return SdpaCall(query, key, value, mask, dropout_p, bool(is_causal), scale, enable_gqa, lengths)


def _as_float(scale: Any) -> float:
    """Return ``scale``, which may be a NumPy number or a tensor with one element. Raise ``TypeError`` if it
    is no number.
    """
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"scale is {scale!r}; expected a number, or None for 1 / √D.") from error


def _cast_for_autocast(x: Any) -> Any:
    """Return the tensor ``x`` in the dtype of autocast. float64, bool and None stay as they are."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _lookup_key(call: SdpaCall) -> Any:
    """Return the key of a call in the cache of plans; None if the call must not be cached.

    It has all that :meth:`MeshAttention._prepare` reads of a call: what else that read would be ignored from
    the second call on.
    """
    query, key, value, mask, *flags = call
    # Do not cache nested tensors, whose `shape` raises: check_kind() refuses them. Do not cache while the
    # user has disabled the math backend: whether a call is valid then depends on the other enabled backends,
    # which are not part of the key.
    try:
        if query.is_nested or key.is_nested or value.is_nested or not math_sdp_enabled():
            return None
        keeps_graph = torch.is_grad_enabled()
        of_mask = None
        if mask is not None:
            if mask.is_nested:
                return None
            needs_grad = keeps_graph and mask.requires_grad
            of_mask = (mask.shape, mask.dtype, mask.device, mask.layout, type(mask), needs_grad)
    except AttributeError:  # An argument is not a tensor. check_kind() raises TypeError for it later.
        return None
    return (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        type(query),
        type(key),
        type(value),
        keeps_graph and (query.requires_grad, key.requires_grad, value.requires_grad),
        of_mask,
        *flags,
    )


def _in_one_batch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors with one batch dim, ``[B, H, S, D]``, and the mask with one or none."""
    leading = query.shape[:-3]
    batch = prod(leading)
    if mask is not None and mask.ndim > 3:
        if all(size == 1 for size in mask.shape[:-3]):
            mask = mask.reshape(1, *mask.shape[-3:])
        else:
            mask = mask.expand(*leading, *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])
    query, key, value = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
    return query, key, value, mask
