"""Find the supported names that are closest to a name, for messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from para_core.adapters.denoisers import denoiser_kinds
from para_core.adapters.models import ADAPTERS


def closest_supported(*names: str) -> str:
    """Return the five supported names that are closest to ``names``, class names, as one string for messages."""
    supported = [(adapter.transformer, adapter.pipelines) for adapter in ADAPTERS]
    for kind in denoiser_kinds():
        supported += kind.pipelines.items()
    return _closest(supported, names)


def closest_cached(*names: str) -> str:
    """Return the five names closest to ``names`` among what First Block Cache supports, as one string for messages."""
    return _closest(
        [(adapter.transformer, adapter.pipelines) for adapter in ADAPTERS if adapter.blocks], names
    )


def _closest(kinds: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    """Return the pipelines of the five of ``kinds``, pairs of a class name and pipelines, most similar to ``names``."""

    def similarity(kind: tuple[str, str]) -> float:
        pairs = [(_stem(candidate), _stem(name)) for candidate in kind for name in names]
        return max(SequenceMatcher(None, candidate, name).ratio() for candidate, name in pairs)

    return "; ".join(pipelines for _, pipelines in sorted(kinds, key=similarity, reverse=True)[:5])


def _stem(name: str) -> str:
    """Return a class name in lower case without the words that most models share.

    >>> _stem("WanTransformer3DModel"), _stem("FluxFillPipeline")
    ('wan', 'fluxfill')
    """
    return re.sub(r"Transformer|Pipeline|Model|Condition|[123]D|[^A-Za-z0-9]", "", name).lower()
