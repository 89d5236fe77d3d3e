"""Short forms of descriptions that many model families share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.weights.tensor_plan import COLUMNS, ROWS, Linear

# Streams of a block that takes text and image or video tokens as two tensors, in the order of its output.
TEXT_FIRST = ("encoder_hidden_states", "hidden_states")
TEXT_LAST = ("hidden_states", "encoder_hidden_states")

# Layers of a joint attention that compute the queries, keys and values of both tensors.
JOINT_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def chained(
    *lists: str,
    streams: tuple[str, ...] = ("hidden_states",),
    measured: str = "hidden_states",
    between: tuple[str, ...] = (),
    samples: int = 0,
    conditions: tuple[str, ...] | None = None,
    uncached: tuple[str, ...] = (),
    modulated: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
) -> CachedBlocks:
    """Return a block stack of a single chained :class:`BlockGroup`.
    The arguments are those of the two classes.
    """
    group = BlockGroup(lists, streams, measured, chained=True, between=between, samples=samples)
    return CachedBlocks((group,), conditions, uncached, modulated)


def samples_in_dim_0(*more: str) -> dict[str, int]:
    """Return :attr:`Plan.batched` of a model whose usual inputs, and the inputs ``more``, hold the samples in dim 0."""
    return dict.fromkeys(("hidden_states", "encoder_hidden_states", "timestep", *more), 0)


def linears(*blocks: str, columns: Iterable[str] = (), rows: Iterable[str] = ()) -> dict[str, Linear]:
    """Return the sharding of linear layers of each of ``blocks``: output channels of ``columns``, inputs of
    ``rows``.

    >>> list(linears("blocks.*", columns=["to_q"], rows=["to_out.0"]))
    ['blocks.*.to_q', 'blocks.*.to_out.0']
    """
    styles = {**dict.fromkeys(columns, COLUMNS), **dict.fromkeys(rows, ROWS)}
    return {f"{block}.{name}": style for block in blocks for name, style in styles.items()}
