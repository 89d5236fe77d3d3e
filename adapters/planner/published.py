"""Published models with stored counts, from which their work at any size follows without torch or a download.

``python -m benchmarks.planner.counts`` writes counts.json, in which ``[a, b]`` stands for ``a + b * tokens``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from para_core.adapters.planner.weights import ModuleBytes, Weights
from para_core.adapters.planner.work import AttentionWork, CallWork, GenerationSizes, Workload, check_size
from para_core.devices import letters_of, similar_names

COUNTS = Path(__file__).with_name("counts.json")


@functools.cache
def read_counts() -> Mapping[str, Any]:
    """Return the content of counts.json: the counts of each published model by name."""
    content: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return content


def find_published(name: str) -> str:
    """Return the published model with this name or Hub repository, by its letters and digits alone.

    Raises:
        ValueError: No published model has this name.
    """
    wanted = letters_of(name)
    for key, stored in read_counts().items():
        if wanted in (letters_of(key), letters_of(stored["repository"])):
            return key
    raise ValueError(
        f"model is {name!r}, which is no published model{similar_names(name, read_counts())}; expected one of "
        f"{', '.join(read_counts())}, or a pipeline (on the command line its folder, or its repository on the Hub)."
    )


def published_workload(name: str, changed: Mapping[str, int], steps: int | None) -> Workload:
    """Return the work of one generation with the published model ``name``, at sizes that may be ``changed``.

    Raises:
        ValueError: The model cannot generate a result of this size.
    """
    stored = read_counts()[name]
    usual = GenerationSizes(**stored["sizes"])
    sizes = replace(usual, **dict[str, Any](changed))
    check_size(name, sizes, is_video=usual.frames > 1)
    return Workload(
        name=f"{name}, {sizes}",
        sizes=sizes,
        steps=steps or stored["steps"],
        weights=_read_weights(stored["weights"]),
        call=_read_call(stored["call"], sizes.latents[0] * sizes.tokens),
        branches=stored["branches"],
        batched=stored["batched"],
        heads=stored["heads"],
    )


def _read_weights(stored: Mapping[str, Any]) -> Weights:
    modules = {name: ModuleBytes(**stored[name]) for name in ("transformer", "encoders")}
    blocks = tuple((cost, size) for cost, size in stored["blocks"])
    return Weights(**{**stored, **modules, "blocks": blocks})


def _read_call(stored: Mapping[str, Any], tokens: int) -> CallWork:
    def number(coefficients: tuple[float, float]) -> float:
        return coefficients[0] + coefficients[1] * tokens

    numbers = {name: number(stored[name]) for name in ("products", "moved", "summed")}
    attention = []
    for call in stored["attention"]:
        lengths = {name: round(number(call[name])) for name in ("queries", "keys")}
        attention.append(AttentionWork(**{**call, **lengths}))
    peak = tuple(map(number, stored["peak"]))
    return CallWork(**{**stored, **numbers, "peak": peak, "attention": tuple(attention)})
