"""The options of attention over a mesh that do not depend on a call's tensors, and a schedule of them over steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

import torch

from para_core.attention.backend_selection import BACKENDS, EXACT_FORM, Backend
from para_core.attention.block_mask import BlockMask

# Keys reach the queries of other ring ranks in one of three ways: they are passed on from neighbour to neighbour
# ("alltoall"), gathered at once ("allgather"), or the ranks form a grid, in which queries are sent along rows and keys
# along columns ("2d").
RotateMethod = Literal["alltoall", "allgather", "2d"]
ROTATE_METHODS: tuple[RotateMethod, ...] = get_args(RotateMethod)
# The values of the option comm_dtype, by the names that stand for them in the JSON form of the options.
COMM_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class KeptKeys:
    """Attention in which each head attends only to a share of the keys. **Not exact.** See :class:`SparseKVAttnMode`.

    Args:
        share (`float`): Share of the keys that each head keeps, 0 < share <= 1. The number of keys is rounded up.
        window (`int`, *optional*, defaults to `64`): Number of queries whose attention weights decide which keys are
            kept.

    Raises:
        ValueError: If ``share`` or ``window`` is out of range.
    """

    share: float
    window: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}; expected the share of the keys to keep, 0 < share <= 1.")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}; expected a positive number of observed queries.")

    @property
    def fields(self) -> tuple[float, int]:
        """The arguments of the constructor, for the JSON form of the options."""
        return self.share, self.window

    def observed(self, num_queries: int) -> list[int]:
        """Return the positions of the queries whose attention weights decide which keys are kept.

        They are the middles of ``window`` equal parts of the sequence; all positions if ``num_queries <= window``.

        >>> KeptKeys(0.5, 3).observed(12)
        [2, 6, 10]
        """
        if num_queries <= self.window:
            return list(range(num_queries))
        return [(2 * i + 1) * num_queries // (2 * self.window) for i in range(self.window)]


class AttnKeywords(TypedDict, total=False):
    """The fields of :class:`AttnOptions` as a type for keyword arguments, ``**options: Unpack[AttnKeywords]``."""

    ulysses_chunks: int
    rotate_method: RotateMethod
    comm_dtype: torch.dtype | None
    block_mask: BlockMask | None
    kept_keys: KeptKeys | None
    backend: Backend | None


@dataclass(frozen=True)
class AttnOptions:
    """The options of attention over a mesh, as attention modes, plans and functions such as ``unified_attention`` take.

    :class:`~para_core.modes.unified.UnifiedAttnMode` describes ``ulysses_chunks``, ``rotate_method``, ``comm_dtype``
    and ``backend``. With ``block_mask`` each ring rank sends its keys directly to the ranks that see any of them. With
    ``kept_keys`` (not exact) only kept keys are passed on, except in the cases that
    :func:`~para_core.attention.approximate.snapkv.sparse_attention` names.

    Raises:
        ValueError: A value is unknown, or two options exclude each other.
        TypeError: ``backend`` is not a string.
    """

    ulysses_chunks: int = 1
    rotate_method: RotateMethod = "alltoall"
    comm_dtype: torch.dtype | None = None
    block_mask: BlockMask | None = None
    kept_keys: KeptKeys | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        chunks = self.ulysses_chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"ulysses_chunks is {chunks!r}; expected a positive integer.")
        if self.comm_dtype not in (None, *COMM_DTYPES.values()):
            expected = " or ".join(map(str, COMM_DTYPES.values()))
            raise ValueError(f"comm_dtype is {self.comm_dtype}; expected {expected}, or None for exact attention.")
        if self.rotate_method not in ROTATE_METHODS:
            raise ValueError(f"rotate_method is {self.rotate_method!r}; expected 'alltoall', 'allgather' or '2d'.")
        if self.rotate_method == "2d" and self.comm_dtype is not None:
            raise ValueError(
                f"rotate_method='2d' sends tensors as they are, and comm_dtype is {self.comm_dtype}. Leave comm_dtype "
                "out, or take rotate_method='alltoall'."
            )
        if not (self.backend is None or isinstance(self.backend, str)):
            raise TypeError(
                f"backend is {self.backend!r}; expected a name. An AttentionSchedule is for parallelize_pipe, which "
                "knows the steps."
            )
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}, or None.")

    @property
    def by_position(self) -> bool:
        """Whether ``block_mask`` or ``kept_keys`` is set, so that a query's position decides which keys it sees."""
        return self.block_mask is not None or self.kept_keys is not None

    @property
    def with_gradients(self) -> AttnOptions:
        """The options for calls that require a gradient: without rounding to 8 bits; ``self`` if nothing is rounded."""
        backend = self.backend
        exact = EXACT_FORM[backend] if backend is not None and backend in EXACT_FORM else backend
        if exact == backend and self.comm_dtype is None:
            return self
        return replace(self, comm_dtype=None, backend=exact)

    @property
    def by_name(self) -> dict[str, str]:
        """The options that a user of a pipeline can set, as strings that ranks can compare."""
        return {name: str(getattr(self, name)) for name in ("rotate_method", "backend", "comm_dtype")}

    def as_text(self) -> str:
        """Return this value as JSON. Equal values give equal text on all ranks.

        >>> AttnOptions.read(AttnOptions(ulysses_chunks=2).as_text())
        AttnOptions(ulysses_chunks=2, rotate_method='alltoall', comm_dtype=None, block_mask=None, kept_keys=None,
        backend=None)
        """
        comm_dtype = next((name for name, dtype in COMM_DTYPES.items() if dtype == self.comm_dtype), None)
        blocks = None if self.block_mask is None else self.block_mask.fields
        kept = None if self.kept_keys is None else self.kept_keys.fields
        # This is in the order of the fields.
        text: str = _to_json(self.ulysses_chunks, self.rotate_method, comm_dtype, blocks, kept, self.backend)
        return text

    @staticmethod
    def read(text: str) -> AttnOptions:
        """Return the options whose JSON form :meth:`as_text` wrote."""
        ulysses_chunks, rotate_method, comm_dtype, blocks, kept, backend = json.loads(text).values()
        return AttnOptions(
            ulysses_chunks,
            rotate_method,
            None if comm_dtype is None else COMM_DTYPES[comm_dtype],
            None if blocks is None else BlockMask(*blocks),
            None if kept is None else KeptKeys(*kept),
            backend,
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _to_json(*values: Any) -> str:
    # Dynamo cannot trace the JSON encoder, so it calls this function while tracing and treats the result as a constant.
    # This is correct because the options of a graph never change.
    return json.dumps(dict(zip([field.name for field in fields(AttnOptions)], values, strict=True)))


@dataclass(frozen=True)
class AttentionSchedule:
    """The attention of each denoising step. **Not exact**: all but the first and last steps may approximate.

    Pass it as ``backend=`` of :func:`~para_core.adapters.parallelize_pipe`.

    Args:
        middle (`str` or `KeptKeys`): The attention of the steps between the first and the last ones: a backend such as
            ``"sage"`` or ``"triton-int8"``, or ``KeptKeys(share)``, with which each head attends to a share of the
            keys.
        first (`int`, *optional*, defaults to `4`): Number of steps at the beginning that use the backend ``exact``.
        last (`int`, *optional*, defaults to `4`): Number of steps at the end that use the backend ``exact``.
        exact (`str`, *optional*): The backend of the first and last steps. By default SDPA chooses.

    Raises:
        ValueError: If a backend is unknown, ``exact`` names one that approximates, or a number of steps is negative.
        TypeError: If a number of steps is not an integer.

    Example:
        >>> schedule = AttentionSchedule("triton-int8", first=1, last=2)
        >>> tuple(schedule.is_middle(step, 5) for step in range(5))
        (False, True, True, False, False)
    """

    middle: Backend | KeptKeys
    first: int = 4
    last: int = 4
    exact: Backend | None = None

    def __post_init__(self) -> None:
        exact = [name for name in BACKENDS if name not in EXACT_FORM]
        if not isinstance(self.middle, KeptKeys) and self.middle not in BACKENDS:
            raise ValueError(f"middle is {self.middle!r}; expected one of {', '.join(BACKENDS)}, or KeptKeys(share).")
        if self.exact not in (None, *exact):
            raise ValueError(f"exact is {self.exact!r}; expected one of {', '.join(exact)}, or None.")
        for name, value in (("first", self.first), ("last", self.last)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; expected a number of steps.")
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more steps.")

    @property
    def approximates(self) -> bool:
        """Whether the attention ``middle`` is approximate."""
        return isinstance(self.middle, KeptKeys) or self.middle in EXACT_FORM

    @property
    def backends(self) -> tuple[Backend | None, ...]:
        """The backends of all steps; None among them means that SDPA chooses."""
        return (self.exact,) if isinstance(self.middle, KeptKeys) else (self.exact, self.middle)

    def is_middle(self, step: int, num_steps: int) -> bool:
        """Whether step ``step`` (0 is the first) of ``num_steps`` steps uses the attention ``middle``."""
        return self.first <= step < num_steps - self.last

    def options(self, base: AttnOptions, *, middle: bool) -> AttnOptions:
        """Return ``base`` with the attention of the middle steps if ``middle``, else with that of the other steps."""
        if not middle:
            return replace(base, backend=self.exact)
        if isinstance(self.middle, KeptKeys):
            return replace(base, backend=self.exact, kept_keys=self.middle)
        return replace(base, backend=self.middle)
