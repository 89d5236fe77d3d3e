"""Tensor plans, which say how the linear layers of a model are sharded, and what they name in a module.

Nothing is sharded here: :mod:`para_core.weights.tensor` does that. The plans of known models are in
``adapters/models/``. Tests: tests/weights/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from para_core.plans.module_matching import matching_modules


@dataclass(frozen=True)
class Linear:
    """The sharding of one linear layer.

    Args:
        along (`"colwise"` or `"rowwise"`): ``"colwise"`` gives each rank some of the output channels.
            ``"rowwise"`` gives each rank some of the input channels, and sums the results over the ranks.
        parts (`tuple[int, ...]`, *optional*, defaults to `()`): Relative sizes of the parts that are
            concatenated along the sharded dim, such as query, key and value, or the two halves of a gate.
            Each part is sharded separately. Empty means a single part.
        parts_from (`str`, *optional*, defaults to `""`): Name of the attribute of the layer that holds these
            relative sizes, or the size of the first of two parts: a row-sharded layer that reads attention
            output, then hidden units, has ``"out_features"`` of the former. Used if ``parts`` is empty.

    Raises:
        ValueError: ``along`` is something else.
    """

    along: Literal["colwise", "rowwise"]
    parts: tuple[int, ...] = ()
    parts_from: str = ""

    def __post_init__(self) -> None:
        if self.along not in ("colwise", "rowwise"):
            raise ValueError(f"Linear(along={self.along!r}): expected 'colwise' or 'rowwise'.")

    @property
    def dim(self) -> int:
        """The sharded dim of the weight ``[C_out, C_in]``."""
        return int(self.along == "rowwise")


COLUMNS, ROWS = Linear("colwise"), Linear("rowwise")


@dataclass(frozen=True)
class TensorPlan:
    """The tensor-parallel plan of one model: each rank computes some heads and some feed-forward hidden
    units.

    Module names are patterns: ``*`` matches one part between dots. Patterns that match no module are ignored.
    If several keys of ``linears`` match a layer, the last one counts.

    Args:
        linears (`Mapping[str, Linear]`): The sharding of each linear layer, by name.
        heads (`tuple[str, ...]`, *optional*, defaults to `()`): Names of modules whose attribute ``heads`` is
            divided by the number of ranks.
        counts (`Mapping[str, str]`, *optional*, defaults to `{}`): By module name, another attribute that is
            divided by the number of ranks, such as a number of hidden units.
        norms (`tuple[str, ...]`, *optional*, defaults to `()`): Names of RMS norms over the channels of all
            heads. The sum of squares of a token, which such a norm needs, is added up over the ranks.
        positions (`Mapping[str, int]`, *optional*, defaults to `{}`): For modules that return a tuple of
            tensors for all heads, such as rotary embeddings: the dim of heads or channels, by module name.
            Each rank takes its part of each tensor along this dim.

    Raises:
        TypeError: A value of ``linears`` is no `Linear`, or ``heads`` or ``norms`` is a single name.
    """

    linears: Mapping[str, Linear]
    heads: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, style in self.linears.items():
            if not isinstance(style, Linear):
                raise TypeError(
                    f"TensorPlan(linears={{{name!r}: {style!r}}}): expected a Linear, such as Linear('colwise')."
                )
        for option in ("heads", "norms"):
            names = getattr(self, option)
            # Its letters would be patterns that match no module, and heads that are not divided are wrong in
            # silence.
            if isinstance(names, str):
                raise TypeError(
                    f"TensorPlan({option}={names!r}): expected a tuple of names: {option}=({names!r},)."
                )


def published_tensor_plan(published: Mapping[str, Any]) -> TensorPlan:
    """Return the :class:`TensorPlan` that is equivalent to a diffusers ``_tp_plan``.

    Args:
        published: The style of each linear layer, by name: ``"colwise"``, ``"rowwise"``,
            ``PackedColwiseParallel`` or ``PackedRowwiseParallel``.

    Raises:
        ValueError: If the plan has another style.
    """
    linears = {}
    for name, style in published.items():
        if style in ("colwise", "rowwise"):
            linears[name] = Linear(style)
        elif type(style).__name__ == "PackedColwiseParallel":
            linears[name] = Linear("colwise", tuple(style.blocks or ()), "_tp_packed_col_blocks")
        elif type(style).__name__ == "PackedRowwiseParallel":
            linears[name] = Linear("rowwise", tuple(style.blocks or ()), "_tp_packed_row_blocks")
        else:
            raise ValueError(
                f"a _tp_plan says {style!r} of {name!r}; expected 'colwise', 'rowwise', "
                "PackedColwiseParallel or PackedRowwiseParallel."
            )
    return TensorPlan(linears)


def planned_linears(module: nn.Module, plan: TensorPlan) -> dict[str, tuple[nn.Module, Linear]]:
    """Return the linear layers that ``plan`` shards, each with its :class:`Linear` entry, by name in
    ``module``. A layer that ``module`` holds under several names is there under each of them.
    """
    return {
        name: (layer, style)
        for pattern, style in plan.linears.items()
        for name, layer in matching_modules(module, pattern).items()
    }


def planned_counts(module: nn.Module, plan: TensorPlan) -> list[tuple[str, nn.Module, str]]:
    """Return the numbers of heads and of hidden units that ``plan`` divides by the number of ranks, each as
    the name of a module in ``module``, that module, and its attribute.

    Each number is there once, because it is divided in place, although several patterns may match a module,
    and ``module`` may hold it under several names.
    """
    attributes = [(pattern, "heads") for pattern in plan.heads] + list(plan.counts.items())
    names: dict[tuple[nn.Module, str], str] = {}
    for pattern, attribute in attributes:
        for name, owner in matching_modules(module, pattern).items():
            names.setdefault((owner, attribute), name)
    return [(name, owner, attribute) for (owner, attribute), name in names.items()]


def planned_norms(module: nn.Module, plan: TensorPlan) -> dict[str, nn.Module]:
    """Return the norms whose weights ``plan`` shards, by name in ``module``."""
    return {name: norm for pattern in plan.norms for name, norm in matching_modules(module, pattern).items()}


def part_sizes(linear: Any, style: Linear) -> tuple[int, ...]:
    """Return the sizes of the parts (query, key and value, for example) along the sharded dim; empty for one
    part. Their sum is less than the dim if the relative sizes do not divide it, which check_tensor_plan
    refuses.
    """
    total = linear.weight.shape[style.dim]
    relative = style.parts
    if not relative and style.parts_from:
        # check_tensor_plan refuses a layer without it.
        held = getattr(linear, style.parts_from)
        if isinstance(held, int):
            return held, total - held
        relative = tuple(held)
    if len(relative) < 2:
        return ()
    return tuple(total // sum(relative) * part for part in relative)


def base_linear(layer: nn.Module) -> Any:
    """Return the layer inside a peft adapter, or ``layer`` itself if ``layer`` is not an adapter."""
    return getattr(layer, "base_layer", layer)


def lora_matrices(layer: nn.Module) -> list[tuple[nn.Module, nn.Module]] | None:
    """Return the matrices (A, B) of each LoRA of ``layer``, possibly none; None if ``layer`` has no place for
    LoRAs.
    """
    first, second = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if not isinstance(first, nn.ModuleDict) or not isinstance(second, nn.ModuleDict):
        return None
    return [(first[name], second[name]) for name in first]
