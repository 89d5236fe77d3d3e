"""Stored counts of published models, from which the work of a generation of any size follows without torch.

counts.json is written by ``python -m benchmarks.planner.counts``. A number that depends on the sizes is stored as
coefficients of the quantities of :func:`powers`: ``{"1": 512, "tokens": 1}`` is 512 more than the number of tokens.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.planner.sizes import DecoderCounts, GenerationSizes
from para_core.planner.prediction import Workload
from para_core.planner.traffic import (
    CallWork,
    CountedAttention,
    CountedGather,
    CountedHalo,
    CountedSum,
    ModelCall,
    Operation,
    Product,
    Tokens,
)
from para_core.planner.weights import ModuleBytes, Weights

COUNTS = Path(__file__).with_name("counts.json")
KINDS: Mapping[str, type[Operation]] = {
    kind.__name__: kind for kind in (Product, CountedAttention, CountedGather, CountedSum, CountedHalo)
}


@functools.cache
def read_counts() -> dict[str, Any]:
    """Return the content of counts.json: the counts of each published model by name."""
    content: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return content


def powers(sizes: GenerationSizes) -> dict[str, int]:
    """Return the quantities on which stored numbers depend. A token has 2 × 2 latent pixels.

    >>> powers(GenerationSizes(height=64, width=32, frames=5, text=3))
    {'1': 1, 'tokens': 16, 'frames': 2, 'rows': 4, 'columns': 2, 'area': 8}
    """
    frames, height, width = sizes.latents
    rows, columns = height // 2, width // 2
    area = rows * columns
    return {"1": 1, "tokens": frames * area, "frames": frames, "rows": rows, "columns": columns, "area": area}


def stored_workload(name: str, sizes: GenerationSizes, steps: int) -> Workload:
    """Return the work of one generation with the published model ``name``, from its stored counts."""
    model, stored, quantities = PUBLISHED[name], read_counts()[name], powers(sizes)
    decoder = DecoderCounts(tuple((convolutions, attention) for convolutions, attention in stored["decoder"]))
    calls = {
        int(batch): ModelCall((name, sizes), [_work(part, quantities) for part in parts])
        for batch, parts in stored["calls"].items()
    }
    return Workload(
        name=f"{name}, {sizes}",
        calls=calls,
        branches=model.branches,
        steps=steps,
        weights=_weights(stored["weights"]),
        encoder=stored["encoder"],
        decoder=decoder.operations(sizes, model.tiled),
        heads=stored["heads"],
        frames=sizes.frames,
        encodings=model.prompts,
        height=sizes.height,
        width=sizes.width,
    )


def _number(stored: int | dict[str, float], quantities: Mapping[str, int]) -> int:
    if isinstance(stored, int):
        return stored
    return round(sum(coefficient * quantities[name] for name, coefficient in stored.items()))


def _work(stored: dict[str, Any], quantities: Mapping[str, int]) -> CallWork:
    operations: Counter[Operation] = Counter()
    for number, kind, values in stored["operations"]:
        operations[_operation(KINDS[kind], values, quantities)] += number
    moved, peak = (tuple(_number(x, quantities) for x in stored[name]) for name in ("moved", "peak"))
    return CallWork(
        operations,
        _number(stored["returned"], quantities),
        _number(stored["launches"], quantities),
        (moved[0], moved[1]),
        (peak[0], peak[1]),
    )


def _operation(kind: type[Operation], stored: dict[str, Any], quantities: Mapping[str, int]) -> Operation:
    def value(name: str) -> Any:
        x = stored[name]
        if name == "tokens":
            return _tokens(x, quantities)
        if name in ("rows", "queries", "keys"):
            return tuple(_tokens(entry, quantities) for entry in x)
        return x if x is None or isinstance(x, str) else _number(x, quantities)

    return kind(**{field.name: value(field.name) for field in fields(kind)})


def _tokens(stored: list[Any], quantities: Mapping[str, int]) -> Tokens:
    total, sharded, min_per_rank = stored
    return Tokens(_number(total, quantities), sharded, min_per_rank)


def _weights(stored: dict[str, Any]) -> Weights:
    in_8_bits = stored["in_8_bits"]
    changed = {
        "transformer": ModuleBytes(**stored["transformer"]),
        "encoders": ModuleBytes(**stored["encoders"]),
        "blocks": tuple((cost, size) for cost, size in stored["blocks"]),
        "in_8_bits": None if in_8_bits is None else _weights(in_8_bits),
    }
    return Weights(**{**stored, **changed})
