"""The user's modes: attention inside runs over a mesh, and sequences that are sharded through them are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from para_core.attention.mesh_attention import AttnFunc, MeshAttention
from para_core.attention.options import AttnKeywords, AttnOptions
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.collectives import all_gather
from para_core.distributed.consistency import check_consistent, signature
from para_core.distributed.create_mesh import require_own_gpus
from para_core.distributed.layout import Segment, SequenceLayout, even_layout
from para_core.distributed.mesh import MeshDim, SequenceMesh, guided_mesh
from para_core.distributed.sharding import gather_tokens
from para_core.modes import fused_encoder
from para_core.modes.attention_by_hand import is_softmax, scores_of_own_tokens
from para_core.modes.block_masks import shard_block_mask
from para_core.modes.flex_attention import FlexOverMesh, explain_unsharded_mask
from para_core.modes.inference import layout_of_total, sequence_of_length, sequence_of_symbolic_length
from para_core.modes.interceptor import SDPA, THREAD_STATE, Disabled, call_original, intercept, unintercepted
from para_core.modes.recomputation import bind_checkpoint, bind_reentrant_checkpoint, is_in_backward
from para_core.modes.sharding_mode import ShardingMode, TraceSafeLayout, segments_of
from para_core.torch_internals import OpOverload, no_frame_of_its_own, set_grad_enabled
from para_core.user_warnings import ParallelWarning, warn_user


class UnifiedAttnMode(ShardingMode):
    """Inside ``with UnifiedAttnMode(mesh) as cp:`` every ``scaled_dot_product_attention`` runs over the mesh.

    Each rank calls it with its part of the sequence, and gets its part of the result. Which part a rank holds is said,
    in this order, by ``layout``; by what was sharded with ``cp.shard``; else every rank is taken to hold an equal part.

    Args:
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (a slice of a larger one, too), or a ProcessGroup,
            whose ranks then all go to Ulysses.
        layout: the layout of the queries of every attention call inside, and of its keys unless ``key_layout`` is
            given.
        assume_equal: skip the small exchange that, in eager code, begins each intercepted call, each ``shard`` and each
            ``gather``, and turns input that is bad on one rank into an error on all; and the one with which, on NCCL,
            the mode is made, and which finds ranks that share a GPU. Nothing is exchanged in a compiled graph.
        attn_func: computes attention on one device in place of SDPA: called as
            ``attn_func(query, key, value, attn_mask=, dropout_p=, is_causal=, scale=)`` on several ranks, with
            ``[B, H, S, D]`` and at most one of mask and ``is_causal``, it returns ``out``, or ``(out, lse)`` with lse
            ``[B, H, S_q]`` in float32, which a ring needs.
        options: of :class:`AttnOptions`:

            - ``ulysses_chunks``: without gradients, each rank's heads are split into so many parts, of which the next
              one travels while one is computed.
            - ``comm_dtype``: ``torch.int8`` or ``torch.float8_e4m3fn`` halves the bytes of 16-bit tensors: query, key,
              value and out travel rounded to 8 bits, scaled per token and head. Not exact; without gradients only.
            - ``rotate_method``: how the keys and values of other ring ranks get here: ``"alltoall"``, passed on from
              neighbour to neighbour, or ``"allgather"``, all in one collective, which needs memory for all of them.
              Backward they rotate. ``"2d"``: the ring's ranks are rows and columns, queries travel along the former,
              keys and values along the latter: fewer bytes from 4 ranks on, backward too
              (:mod:`para_core.attention.attention_2d`).
            - ``backend``: what computes attention on one device: ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``,
              or the Triton kernel of this package, ``"triton"``, on one rank, too. By default PyTorch chooses, by its
              own order and the user's ``sdpa_kernel(...)``. ``"triton-int8"``: q·k in 8 bits. Not exact; without
              gradients only.

    >>> import torch.distributed as dist  # doctest: +SKIP
    >>> with UnifiedAttnMode(mesh) as cp:  # doctest: +SKIP
    ...     y = cp.gather(model(cp.shard(x, dim=1)), dim=1)
    """

    # What the ranks of a plain ProcessGroup do, and which mesh dim may have one rank only.
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
        **options: Unpack[AttnKeywords],
    ) -> None:
        # Along which branches of guidance are computed; None: nowhere.
        self._batch: MeshDim | None = None
        if not isinstance(mesh, SequenceMesh):
            guided = guided_mesh(mesh, group_dim=self.group_dim)
            if not assume_equal:
                require_own_gpus(mesh, guided)
            mesh, self._batch = guided.sequence, guided.batch
        super().__init__(mesh, assume_equal=assume_equal)
        self._options = AttnOptions(**options)
        if self._single_dim is not None and (size := getattr(self._mesh, self._single_dim).size) > 1:
            raise ValueError(
                f"{type(self).__name__} got a mesh whose {self._single_dim!r} dim has {size} ranks; expected 1. Use "
                "UnifiedAttnMode for both at once."
            )
        self._attn_func = unintercepted(attn_func)
        self._attention = self._make_attention()
        # Of queries and of keys, if given: decides before what was sharded.
        self._explicit: tuple[TraceSafeLayout, TraceSafeLayout | None] | None = None
        if layout is not None:
            self._explicit = (self._trace_safe(layout), None if key_layout is None else self._trace_safe(key_layout))
        elif key_layout is not None:
            raise ValueError("key_layout was given without layout; give both, or neither.")
        # Whether attention under this mode is what it is without.
        self._is_sdpa = self._mesh.ranks == 1 and not self._options.by_position and self._options.backend is None
        self.intercepted = False
        # Whether attention to this rank's tokens was computed that no mode intercepts.
        self._computed_by_hand = False
        # Whether a bound function runs in the state of its call.
        self._is_resumed = False

    def _make_attention(self) -> MeshAttention:
        return MeshAttention(
            self._mesh, self._layouts, self._options, assume_equal=self._assume_equal, attn_func=self._attn_func
        )

    # -- entering and leaving

    def _note_state(self) -> None:
        layouts = () if self._explicit is None else self._explicit
        explicit = tuple([None if layout is None else segments_of(layout) for layout in layouts])
        self._attention.under((explicit, segments_of(self._known)))
        # A model that is called without any shard computes the same on every rank: looked for while nothing says
        # otherwise.
        self._attention.looks_for_copies = self._mesh.ranks > 1 and not (layouts or self._known)

    def _note_sharded(self, x: Tensor, dim: int) -> None:
        if dim % x.ndim == x.ndim - 2:
            self._attention.reviews.trust(x)

    def _begin(self) -> None:
        fused_encoder.switch_off()

    def _end(self) -> None:
        fused_encoder.put_back()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if self._mesh.ranks > 1 and self._depth == 0:
            explain_unsharded_mask(exc_val)

    def _check_use(self) -> None:
        if self._is_sdpa:
            return
        by_hand, self._computed_by_hand = self._computed_by_hand, False
        if by_hand:
            message = (
                f"{type(self).__name__} on {self._mesh.ranks} ranks: a softmax over the scores of this rank's queries "
                "and keys "
                "was computed, which is attention to this rank's tokens only. Use F.scaled_dot_product_attention (in "
                "transformers "
                "attn_implementation='sdpa'); where a rank's tokens shall attend to themselves, "
                "UnifiedAttnMode.disable()."
            )
            if not self.intercepted:
                raise RuntimeError(message)
            warn_user(message, ParallelWarning)
        elif not self.intercepted:
            self.intercepted = True  # once per mode
            warn_user(
                f"{type(self).__name__} on {self._mesh.ranks} ranks intercepted no scaled_dot_product_attention: if "
                "anything "
                "inside computes attention, it ran on this rank's tokens only. Attention in a Triton kernel or in a "
                "package's own "
                "binding (sageattention, transformer_engine, flash_attn before 2.7) cannot be seen; switch to SDPA or "
                "a later "
                "flash_attn.",
                ParallelWarning,
            )

    @staticmethod
    def disable() -> TorchFunctionMode:
        """Return a context in which no mode of this class intercepts anything."""
        return Disabled()

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, run under this mode whenever it is called.

        It can be called after the mode has been left. It then has the sequences and layouts of its last call inside the
        mode, or, without one, those of now. ``torch.utils.checkpoint`` needs no binding in eager code: inside the mode
        it is done automatically.
        """
        state = self._known, self._explicit

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal state
            if self._depth > 0 and (self._is_resumed or not is_in_backward()):
                state = self._known, self._explicit
                with self:
                    return function(*args, **kwargs)
            with self._resumed(*state):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _resumed(
        self, sequences: TraceSafeLayout, explicit: tuple[TraceSafeLayout, TraceSafeLayout | None] | None
    ) -> Iterator[None]:
        """Inside, this mode is on with the sequences and layouts that it had when they were read."""
        before = self._known, self._explicit, self._is_resumed, self.intercepted
        try:
            with self:
                self._is_resumed = True
                self._explicit = explicit
                self._set_known(sequences)
                yield
                # Leaving the mode here is not the end of its use.
                self.intercepted, self._computed_by_hand = True, False
        finally:
            sequences, self._explicit, self._is_resumed, intercepted = before
            self.intercepted = self.intercepted or intercepted
            self._set_known(sequences)

    # -- intercepting

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self._is_sdpa:
            return call_original(func, args, kwargs or {})
        if func is SDPA and (torch.compiler.is_compiling() or not THREAD_STATE.handlers):
            return self.attend(SdpaCall(*args, **(kwargs or {})))
        if func is set_grad_enabled and not torch.compiler.is_compiling() and args == (False,):
            bind_reentrant_checkpoint(self.bound)
        if not torch.compiler.is_compiling() and type(func) is OpOverload and func.namespace == "para_core":
            # A compiled graph runs; of its attention only the operator is seen.
            bind_checkpoint(self, self.bound)
        if not torch.compiler.is_compiling() and is_softmax(func):
            mesh = self._mesh
            by_hand = scores_of_own_tokens(args, kwargs or {}, segments_of(self._known), mesh.rank, mesh.ranks)
            self._computed_by_hand = self._computed_by_hand or by_hand
        fail = self._attention.raise_everywhere
        return intercept(
            self, self.attend, self._mesh.ranks, func, args, kwargs or {}, flex=self._flex_attention, fail=fail
        )

    def _flex_attention(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        self.intercepted = True
        flex = FlexOverMesh(self._mesh, self._layouts, self._options, assume_equal=self._assume_equal)
        return flex(operator, args, kwargs)

    def attend(self, call: SdpaCall) -> Tensor:
        """Compute an intercepted call over the mesh."""
        self.intercepted = True
        if self._is_sdpa:
            return call.on_one_device()
        if not torch.compiler.is_compiling():
            bind_checkpoint(self, self.bound)
        return self._attention(call)

    # -- which rank computes which branches of guidance

    def split_branches(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of ``x``, which holds all CFG branches (or samples) one after the other along
        ``dim``.

        Over the ``batch`` mesh dim; without one, ``x`` itself. :meth:`shard` shards what this gives along its tokens.

        Raises:
            ValueError: the ranks along ``batch`` cannot have equal parts.
        """
        if self._batch is None or self._batch.size == 1:
            return x
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % self._batch.size != 0:
            raise ValueError(
                f"x has shape {list(x.shape)}, of which {self._batch.size} ranks along 'batch' cannot have equal "
                "parts along "
                f"dim {dim}. Put all branches of guidance one behind the other along it: torch.cat([uncond, cond], "
                f"dim={dim})."
            )
        size = x.shape[dim] // self._batch.size
        return x.narrow(dim, self._batch.index * size, size).clone(memory_format=torch.contiguous_format)

    def merge_branches(self, y: Tensor, dim: int = 0) -> Tensor:
        """Gather the parts of all ranks along ``batch``, one after the other along ``dim``: what :meth:`split_branches`
        split.
        """
        if self._batch is None or self._batch.size == 1:
            return y
        return all_gather(y, [y.shape[dim]] * self._batch.size, dim, self._batch).contiguous()

    # -- which rank holds which tokens

    @overload
    def shard(
        self,
        x: Tensor,
        dim: int,
        *,
        sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor: ...
    @overload
    def shard(
        self, x: BlockMask, *, sequence: SequenceLayout | None = None, key_sequence: SequenceLayout | None = None
    ) -> BlockMask: ...
    def shard(
        self,
        x: Tensor | BlockMask,
        dim: int | None = None,
        *,
        sequence: SequenceLayout | None = None,
        key_sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor | BlockMask:
        """Return this rank's part of ``x``. Every rank passes the same whole ``x``.

        Args:
            x: a tensor of any shape and length; or a ``BlockMask`` of flex attention over all tokens.
            dim: of a tensor, the dim to shard.
            sequence: from :meth:`sequence`; needed inside a compiled function, else read off ``x``. Of a mask, that of
                its queries.
            key_sequence: of a mask, that of its keys; defaults to that of its queries if there are as many.
            balance: see :meth:`sequence`. A mask has that of the tokens that were sharded before it.

        Raises:
            ValueError: in eager code on every rank, if ``x`` is not as long on all ranks, or not as ``sequence`` says.
        """
        if isinstance(x, BlockMask):
            if dim is not None or balance is not None:
                raise TypeError(
                    "cp.shard of a BlockMask takes no dim= and no balance=; say it with sequence=cp.sequence(...)."
                )
            return self._shard_block_mask(x, sequence, key_sequence)
        if dim is None or key_sequence is not None:
            raise TypeError("cp.shard of a tensor needs dim=, and takes no key_sequence=.")
        return super().shard(x, dim, sequence=sequence, balance=balance)

    def _shard_block_mask(
        self, mask: BlockMask, sequence: SequenceLayout | None, key_sequence: SequenceLayout | None
    ) -> BlockMask:
        if self._mesh.ranks == 1:
            return mask
        talk = not (self._assume_equal or torch.compiler.is_compiling())
        if talk:
            self._mesh.check_alive()
        try:
            num_queries, num_keys = mask.seq_lengths
            if sequence is not None and key_sequence is None and num_queries == num_keys:
                key_sequence = sequence
            query_layout = self._whole_layout(num_queries, sequence, "query")
            key_layout = self._whole_layout(num_keys, key_sequence, "key")
            sharded = shard_block_mask(mask, query_layout, key_layout, self._mesh)
        except (TypeError, ValueError) as error:
            if talk:
                check_consistent(error, self._mesh)
            raise
        if talk:
            lengths = {"query lengths per rank": query_layout.sizes(), "key lengths per rank": key_layout.sizes()}
            check_consistent(signature({"block_mask": [*mask.shape], **lengths}), self._mesh)
        return sharded

    def _whole_layout(
        self, total: int, sequence: SequenceLayout | None, kind: Literal["query", "key"]
    ) -> SequenceLayout:
        """Return the layout of ``total`` tokens: the given one, that of a sharded sequence, or equal parts."""
        if sequence is not None:
            return self._checked(sequence)
        if self._explicit is not None:
            of_queries, of_keys = self._explicit
            held = of_queries if kind == "query" or of_keys is None else of_keys
            return SequenceLayout(segments_of(held), self._mesh.ranks)
        return layout_of_total(total, segments_of(self._known), self._mesh.ranks, kind=kind)

    def replicated(self, x: Tensor, dim: int = -2) -> Tensor:
        """Say that every rank holds all tokens of ``x``, along ``dim``; returns ``x``.

        From then on, keys of that length are taken to be replicated: cross-attention to them sends nothing. Where such
        tokens are concatenated with sharded ones, say the order with :meth:`using`.
        """
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        self._remember(Segment("replicated", x.shape[dim], replicated=True))
        return x

    def local_mask(self, mask: Tensor, *, sequence: SequenceLayout | None = None) -> Tensor:
        """Gather an attention mask of this rank's keys along its last dim, so that it has a column per key of the
        sequence.

        A mask is read like this by itself where lengths leave no doubt.

        Args:
            sequence: of the keys; as for :meth:`gather`.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError("inside a compiled function cp.local_mask needs sequence=, as cp.gather does.")
        layout = self._agree(mask, -1, sequence, whole=False)
        return mask if self._mesh.ranks == 1 else gather_tokens(mask, -1, layout, self._mesh)

    @contextmanager
    def using(self, layout: SequenceLayout, *, key_layout: SequenceLayout | None = None) -> Iterator[None]:
        """Inside, every attention call has ``layout`` for its queries, and ``key_layout`` (or the same) for its
        keys.
        """
        before = self._explicit
        self._set_explicit((self._trace_safe(layout), None if key_layout is None else self._trace_safe(key_layout)))
        try:
            yield
        finally:
            self._set_explicit(before)

    def _set_explicit(self, layouts: tuple[TraceSafeLayout, TraceSafeLayout | None] | None) -> None:
        self._explicit = layouts
        if not torch.compiler.is_compiling():
            self._note_state()

    def set_layout(self, layout: SequenceLayout) -> None:
        """Every attention call from now on has ``layout``: :meth:`using`, for as long as the mode lives."""
        self._set_explicit((self._trace_safe(layout), None))

    def _layouts(self, num_queries: int, num_keys: int, ordered: bool) -> tuple[SequenceLayout, SequenceLayout]:
        query_layout = self._layout_of(num_queries, "query", ordered)
        keys_apart = self._explicit is not None and self._explicit[1] is not None
        if num_keys == num_queries and not keys_apart:
            return query_layout, query_layout
        return query_layout, self._layout_of(num_keys, "key", ordered)

    def _layout_of(self, held: int, kind: Literal["query", "key"], ordered: bool) -> SequenceLayout:
        """Return the layout of the sequence of which this rank holds ``held`` tokens: the given one, a sharded one, or
        equal parts.
        """
        mesh = self._mesh
        if self._explicit is not None:
            of_queries, of_keys = self._explicit
            held_layout = of_queries if kind == "query" or of_keys is None else of_keys
            layout = SequenceLayout(segments_of(held_layout), mesh.ranks)
            if held != layout.size(mesh.rank):
                raise ValueError(
                    f"{kind} has {held} tokens, but the layout gives this rank {layout.size(mesh.rank)} of "
                    f"{layout.total}. "
                    "Pass the layout that it was sharded by (cp.using(layout, key_layout=...))."
                )
            return layout
        if not self._known:
            return even_layout(held * mesh.ranks, mesh.ranks)
        infer = sequence_of_symbolic_length if torch.compiler.is_compiling() else sequence_of_length
        return infer(held, segments_of(self._known), mesh.rank, mesh.ranks, kind=kind, ordered=ordered)


class RingAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` on a mesh without an ``ulysses`` dim (or one of size 1): keys and values travel."""

    group_dim = "ring"
    _single_dim = "ulysses"


class UlyssesAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` on a mesh without a ``ring`` dim (or one of size 1): tokens are traded for heads."""

    _single_dim = "ring"
