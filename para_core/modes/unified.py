"""Torch function modes that run attention over a mesh, exactly: over a ring, with Ulysses, or both.

Users enter them around their own models; a model with a plan has :mod:`para_core.plans.interception` instead.
Attention itself is computed by :mod:`para_core.attention.mesh_attention`.

Where the state of a mode is written: ``_is_sdpa`` in ``__init__`` alone; ``_depth`` in :mod:`.sharding_mode`, on
entering and leaving; ``_follows_masks`` in ``_note_sharded``, which never clears it; ``_noted`` in
``_note_state``; ``_is_resumed`` in ``_resume``; ``intercepted`` in ``_begin``, in ``_resume``, at each attention
call, and by :mod:`para_core.plans.current_call`.

Tests: tests/modes/test_unified.py, tests/attention/test_exactness.py; of ``bound`` and its branches also
tests/modes/test_recomputation.py and tests/test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from para_core.attention.attention_options import AttnOptions
from para_core.attention.backends.added import check_library
from para_core.attention.local import AttnFunc
from para_core.attention.mask_rows import follow_parts, mark_part
from para_core.attention.mesh_attention import MeshAttention
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.collectives import all_gather
from para_core.distributed.create_mesh import check_distinct_gpus
from para_core.distributed.mesh import MeshDim, SequenceMesh, guided_mesh
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.modes import fused_encoder
from para_core.modes.handwritten import HandwrittenAttention, may_be_scores
from para_core.modes.interceptor import (
    DISPATCHER_CONTEXTS,
    SDPA,
    Disabled,
    call_original,
    check_replaced_attention,
    intercept,
    without_interception,
)
from para_core.modes.layout_mode import ExplicitLayouts, LayoutMode
from para_core.modes.registry import RECOMPUTATION, MeshAccess, explain
from para_core.modes.sharding_mode import TraceSafeLayout, segments_of
from para_core.torch_internals import (
    OpOverload,
    is_in_backward,
    no_frame_of_its_own,
    set_grad_enabled,
    top_saved_tensors_hooks,
)
from para_core.user_warnings import ParallelWarning, warn_user

# A mode has no call of a model that checkpoints could be outside of: all that run inside it are bound.
_NO_HOOKS_OUTSIDE = 0


class UnifiedAttnMode(LayoutMode):
    """A context in which every ``scaled_dot_product_attention`` runs over the ranks of ``mesh``.

    Each rank calls SDPA with its part of the sequence and gets its part of the result. The part that a rank
    holds is determined by ``layout`` if it is passed, else by the tensors that were sharded with
    ``cp.shard``. Without either, all ranks are assumed to hold equal parts.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): A mesh, or a slice of one, with a ``ring`` dim, a ``ulysses``
            dim or both. :meth:`split_branches` uses its ``batch`` dim. All ranks of a ProcessGroup are used
            for Ulysses.
        layout (:class:`SequenceLayout`, *optional*): The layout of the queries of every intercepted call, and
            of the keys unless ``key_layout`` is passed.
        key_layout (:class:`SequenceLayout`, *optional*): The layout of the keys. Requires ``layout``.
        assume_equal (`bool`, *optional*, defaults to `False`): Whether to skip the small exchanges between
            ranks. In eager code, an exchange before each intercepted call, ``shard`` and ``gather`` turns
            invalid input on one rank into an error on all ranks. On NCCL, another exchange in this
            constructor detects ranks that share a GPU. Compiled graphs run neither exchange.
        attn_func (`Callable`, *optional*): A function that computes local attention in place of SDPA on
            several ranks. It is called as ``attn_func(query, key, value, attn_mask=, dropout_p=, is_causal=,
            scale=)`` with tensors ``[B, H, S, D]`` and at most one of ``attn_mask`` and ``is_causal``. It
            returns ``out``, or ``(out, lse)`` with a float32 lse ``[B, H, S_q]``; a ring needs the lse.
        options (*optional*): Options of :class:`AttnOptions`:

            - ``comm_dtype`` (`torch.dtype`, *optional*): ``torch.int8`` or ``torch.float8_e4m3fn`` halves the
              bytes sent for 16-bit tensors: query, key, value and output are rounded to 8 bits, with one
              scale per token and head. Not exact, and only applied to calls that require no gradient; with
              ``attn_func``, which may use parameters of its own, only while gradients are disabled.
            - ``rotate_method`` (`str`, *optional*, defaults to `"alltoall"`): How keys and values reach the
              other ranks of a ring. ``"alltoall"`` passes them on from neighbour to neighbour.
              ``"allgather"`` gathers them in one collective, which needs memory for all of them; the backward
              still passes them on. ``"2d"`` arranges the ring as a grid and sends queries along its rows,
              keys and values along its columns, in the backward too. With 4 or more ranks ``"2d"`` sends
              fewer bytes, unless their number is prime or there are few key heads
              (:mod:`para_core.attention.grid_2d`). ``"gathered"`` gathers keys and values in one collective
              before one attention to all of them, which has the bits of one process
              (:mod:`para_core.attention.gathered`).
            - ``backend`` (`str`, *optional*): The implementation of local attention, on a single rank too:
              ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``; ``"triton"`` for the Triton kernel of
              this package; ``"flash3"`` or ``"flash4"`` for FlashAttention-3 or -4, if it is installed.
              ``"triton-int8"`` and ``"sage"`` (SageAttention) compute q·k in 8 bits; they are not exact, and
              only applied to calls that require no gradient. Defaults to the choice of PyTorch, which
              respects ``sdpa_kernel(...)``.

    Raises:
        ImportError: If ``backend`` names a library that is not installed.
        TypeError: If a layout is no :class:`SequenceLayout`.
        ValueError: If the mesh has no suitable dim, a layout is for another number of ranks, ``key_layout``
            is passed without ``layout``, or an option has an unknown value or excludes another option.

    >>> import torch.distributed as dist  # doctest: +SKIP
    >>> with UnifiedAttnMode(mesh) as cp:  # doctest: +SKIP
    ...     y = cp.gather(model(cp.shard(x, dim=1)), dim=1)
    """

    # group_dim is the mesh dim that all ranks of a plain ProcessGroup form. _single_dim is the mesh dim that
    # must have size 1, or None if both dims may be larger.
    group_dim = "ulysses"
    _single_dim: str | None = None

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        *,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
        assume_equal: bool = False,
        attn_func: AttnFunc | None = None,
        **options: Any,
    ) -> None:
        # The mesh dim over which CFG branches are split; None if the mesh has none.
        self._batch: MeshDim | None = None
        if not isinstance(mesh, SequenceMesh):
            guided = guided_mesh(mesh, group_dim=self.group_dim)
            if not assume_equal:
                check_distinct_gpus(mesh, guided)
            mesh = guided.sequence
            self._batch = guided.batch
        super().__init__(mesh, layout=layout, key_layout=key_layout, assume_equal=assume_equal)
        # Public. Not a property, because Dynamo cannot read one of a mode while it traces an operator under
        # it.
        self.ranks = self._mesh.ranks
        self._options = AttnOptions.of(**options)
        check_library(self._options.backend)
        if self._single_dim is not None and (size := getattr(self._mesh, self._single_dim).size) > 1:
            raise ValueError(
                f"{type(self).__name__} got a mesh whose {self._single_dim!r} dim has {size} ranks; expected 1. Use "
                "UnifiedAttnMode for both at once."
            )
        self._attention = MeshAttention(
            self._mesh,
            self._layouts,
            self._options,
            assume_equal=assume_equal,
            attn_func=without_interception(attn_func),
        )
        # Whether this mode leaves attention unchanged, so that calls go straight to SDPA.
        self._is_sdpa = (
            self._mesh.ranks == 1 and not self._options.by_position and self._options.backend is None
        )
        # intercepted: whether attention was called since the mode was entered. It is public, because
        # current_call.py sets it from outside for a cache that skips all blocks. _warned: whether the warning
        # of _check_use was given.
        self.intercepted = self._warned = False
        # Whether a tensor that may be a mask was sharded, so that masks computed from it are noted.
        self._follows_masks = False
        # What the model computed by hand over this rank's tokens (matmul, softmax, matmul).
        self._by_hand = HandwrittenAttention(ignores_graphs=attn_func is not None)
        # Whether a wrapper made by bound() is running after the mode was left or in a backward, with the
        # layouts that it has stored.
        self._is_resumed = False
        # The sequences and explicit layouts whose plans are looked up.
        self._noted = (self._known, self._explicit)

    def _note_state(self) -> None:
        # All that LayoutMode._layouts reads must be part of this state, by which the plans of calls are
        # cached.
        self._noted = (self._known, self._explicit)
        layouts: Sequence[TraceSafeLayout | None] = ()
        if self._explicit is not None:
            layouts = self._explicit
        explicit: list[tuple[Segment, ...] | None] = []
        for layout in layouts:
            if layout is None:
                explicit.append(None)
            else:
                explicit.append(segments_of(layout))
        self._attention.switch_cache((tuple(explicit), segments_of(self._known)))

    def _note_sharded(self, x: Tensor, dim: int, layout: SequenceLayout) -> None:
        mark_part(x, dim, layout, self._mesh.rank)
        # Follow what is computed from x only if x may be a mask, because that costs time in each function.
        numbers = {layout.total, *[segment.total for segment in segments_of(self._known)]}
        is_part_of_rows = dim % x.ndim == x.ndim - 2 and (x.dtype == torch.bool or x.shape[-1] in numbers)
        # Several columns tell by their number that they are this rank's.
        is_one_column = dim % x.ndim == x.ndim - 1 and x.shape[-1] == 1 < layout.total
        if is_part_of_rows or is_one_column:
            self._follows_masks = True

    def _begin(self) -> None:
        if not (self._is_sdpa or torch.compiler.is_compiling()):
            check_replaced_attention(self._mesh.ranks)
        self.intercepted = False
        self._by_hand.clear()
        fused_encoder.disable()

    def _end(self) -> None:
        fused_encoder.restore()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if self._depth == 0:
            if exc_type is None and not torch.compiler.is_compiling():
                self._check_use()
            if self._mesh.ranks > 1:
                explain(exc_val)

    def _check_use(self) -> None:
        """Raise or warn if attention was computed by hand inside the mode.
        Warn if no attention was intercepted.
        """
        if self._is_sdpa:
            return
        if self._by_hand.places:
            message = (
                f"{type(self).__name__} on {self._mesh.ranks} ranks: scores over this rank's tokens were normalized by "
                f"hand, in {self._by_hand.describe(None)}. That is attention to this rank's tokens only. Use "
                "F.scaled_dot_product_attention (in transformers attn_implementation='sdpa'; an attention sink is "
                "one more key, with a float attn_mask for its score); where a rank's tokens shall attend to "
                "themselves, UnifiedAttnMode.disable()."
            )
            self._by_hand.clear()
            if not self.intercepted:
                raise RuntimeError(message)
            warn_user(message, ParallelWarning)
        elif not (self.intercepted or self._warned):
            self._warned = True  # Warn only once for each mode.
            warn_user(
                f"{type(self).__name__} on {self._mesh.ranks} ranks intercepted no scaled_dot_product_attention: if "
                "anything inside computes attention, it ran on this rank's tokens only. Attention in a Triton kernel, "
                "in TorchScript, in an exported program or in a package's own binding (sageattention, "
                "transformer_engine, flash_attn before 2.7) cannot be seen; switch to SDPA in eager or compiled code, "
                "or to a later flash_attn.",
                ParallelWarning,
            )

    @staticmethod
    def disable() -> TorchFunctionMode:
        """Return a context in which no mode of this package intercepts attention: SDPA runs on this rank's tokens."""
        return Disabled()

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that runs ``function`` under this mode, also after the mode has been left.

        A call after the mode has been left uses the sequences and layouts of the wrapper's last call inside
        the mode. Without such a call, it uses those that were current when ``bound`` was called. In eager
        code ``torch.utils.checkpoint`` needs no ``bound``, because the mode binds checkpointed functions
        automatically.

        Args:
            function (`Callable`): The function to run under this mode.
        """
        # A call is in one of three places: inside the mode; after it was left; or in a backward, which
        # recomputes a checkpoint. The first uses the layouts of now and keeps them for the others, which use
        # what was kept. A call inside a call of the others (``_is_resumed``) is inside again.
        state = self._known, self._explicit

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal state
            if self._depth > 0 and (self._is_resumed or not is_in_backward()):
                state = self._known, self._explicit
                with self:
                    return function(*args, **kwargs)
            with self._resume(*state):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _resume(self, sequences: TraceSafeLayout, explicit: ExplicitLayouts | None) -> Iterator[None]:
        """Enter this mode with these layouts inside the ``with`` block, and put everything back afterwards."""
        before = self._known, self._explicit, self._is_resumed, self.intercepted
        is_left = self._depth == 0
        try:
            # What the function computes by hand was noted when it ran inside the mode.
            with self._by_hand.pause(), self:
                self._is_resumed = True
                self._restore(sequences, explicit)
                yield
                if is_left:
                    # Keep _check_use from warning when this internal use of the mode ends. Inside the mode it
                    # does not end, and must not count as attention of the model.
                    self.intercepted = True
        finally:
            known, earlier_explicit, self._is_resumed, intercepted = before
            self.intercepted = self.intercepted or intercepted
            self._restore(known, earlier_explicit)

    def _restore(self, sequences: TraceSafeLayout, explicit: ExplicitLayouts | None) -> None:
        """Set the known sequences and the explicit layouts, and note the state once, with both of them."""
        self._explicit = explicit
        self._set_known(sequences)

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self._is_sdpa:
            return call_original(func, args, kwargs or {})
        # Ask once per function: each question costs the host two Python calls.
        is_traced = torch.compiler.is_compiling()
        # The first branch of intercept(), repeated to save a Python call per SDPA call.
        # tests/modes/test_unified.py compares the two: the operator of torch.ops takes that branch.
        if func is SDPA and (is_traced or not DISPATCHER_CONTEXTS.entered):
            return self._attend(SdpaCall(*args, **(kwargs or {})), is_traced=is_traced)
        if func is set_grad_enabled and not is_traced and args == (False,):
            for recomputation in RECOMPUTATION:
                recomputation.gradients_disabled(self.bound)
        if not is_traced and type(func) is OpOverload and func.namespace == "para_core":
            # A compiled graph is running. It contains an operator of this package in place of the SDPA call,
            # so only here can the mode notice attention inside a checkpoint.
            for recomputation in RECOMPUTATION:
                recomputation.attention_called(self, self.bound, _NO_HOOKS_OUTSIDE)
        output = intercept(self, self, func, args, kwargs or {})
        # Test this first: every attribute that is read while tracing becomes a guard of the graph.
        if is_traced:
            return output
        if self._follows_masks:
            follow_parts(func, args, (kwargs or {}).values(), output)
        if may_be_scores(func):
            self._by_hand.note(func, args, kwargs or {}, output, self._numbers_of_tokens())
        return output

    def _numbers_of_tokens(self) -> set[int]:
        """Return how many tokens this rank holds of each sharded sequence, and of all sequences together."""
        segments = segments_of(self._known)
        sizes = [segment.size(self._mesh.rank, self._mesh.ranks) for segment in segments]
        sharded = {size for segment, size in zip(segments, sizes, strict=True) if not segment.replicated}
        if not sharded:
            return set()
        return sharded | {sum(sizes)}

    def fail(self, error: Exception) -> NoReturn:
        """Raise ``error`` on every rank. Collective, unless ``assume_equal`` is set."""
        self._attention.raise_everywhere(error)

    def begin_other_call(self, *, counts: bool) -> MeshAccess:
        """Return the mesh and the layouts for an attention call that is no SDPA.

        A mode ignores ``counts``, by which a plan numbers its attention calls. A call that is only prepared
        (``counts`` is False) is traced by Dynamo, and the graph that computes it does not come here. So it
        makes the mode ``intercepted`` too, or the mode would warn of attention that it computes.
        """
        self.intercepted = True
        return MeshAccess(self._mesh, self._layouts, self._options, self._assume_equal)

    def attend(self, call: SdpaCall) -> Tensor:
        """Return the output of an intercepted SDPA call for this rank's queries, computed over the mesh. Collective."""
        if self._is_sdpa:
            self.intercepted = True
            return call.on_one_device()
        return self._attend(call, is_traced=torch.compiler.is_compiling())

    def _attend(self, call: SdpaCall, *, is_traced: bool) -> Tensor:
        """Do what :meth:`attend` does, if this mode does not leave attention unchanged. Collective."""
        self.intercepted = True
        # Most calls are not inside a checkpoint. Test it here to save the time of a function call.
        if not is_traced and top_saved_tensors_hooks(True) is not None:
            for recomputation in RECOMPUTATION:
                recomputation.attention_called(self, self.bound, _NO_HOOKS_OUTSIDE)
        # A graph sets the layouts, too, and notes nothing.
        if not is_traced and (self._noted[0] is not self._known or self._noted[1] is not self._explicit):
            self._note_state()
        return self._attention(call)

    def split_branches(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's CFG branches (or samples) of ``x``, as a contiguous copy.

        The branches are split over the ``batch`` mesh dim. Without such a dim the method returns ``x``
        itself. Pass the result to :meth:`shard` to shard its tokens too.

        Args:
            x (`Tensor`): A tensor with all branches concatenated along ``dim``.
            dim (`int`, *optional*, defaults to `0`): The dim of the branches.

        Raises:
            ValueError: If ``dim`` is out of range, or the ``batch`` ranks cannot get equal parts.
        """
        if self._batch is None or self._batch.size == 1:
            return x
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % self._batch.size != 0:
            raise ValueError(
                f"x has shape {list(x.shape)}, of which {self._batch.size} ranks along 'batch' cannot have equal parts "
                f"along dim {dim}. Put all branches of guidance one behind the other along it: torch.cat([uncond, "
                f"cond], dim={dim})."
            )
        size = x.shape[dim] // self._batch.size
        return x.narrow(dim, self._batch.index * size, size).clone(memory_format=torch.contiguous_format)

    def merge_branches(self, y: Tensor, dim: int = 0) -> Tensor:
        """Return the branches of all ranks of the ``batch`` mesh dim: the inverse of :meth:`split_branches`.

        This is a collective over the ``batch`` mesh dim: all its ranks must call it, and their shapes are not
        compared. Without such a dim the method returns ``y`` itself.

        Args:
            y (`Tensor`): This rank's branches, of the same shape on all ranks.
            dim (`int`, *optional*, defaults to `0`): The dim along which branches are concatenated.
        """
        if self._batch is None or self._batch.size == 1:
            return y
        return all_gather(y, [y.shape[dim]] * self._batch.size, dim, self._batch).contiguous()


class RingAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` with ring attention only: keys and values are sent between ranks.

    The ``ulysses`` mesh dim must be absent or have size 1. All ranks of a ProcessGroup form the ring.
    """

    group_dim = "ring"
    _single_dim = "ulysses"


class UlyssesAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` with Ulysses attention only: an all-to-all exchanges tokens for heads.

    The ``ring`` mesh dim must be absent or have size 1. All ranks of a ProcessGroup are used for Ulysses.
    """

    _single_dim = "ring"
