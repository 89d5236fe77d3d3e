"""Adapters: data that says what each model family shards, gathers and caches.

A family is one file that no other file imports, and one line of ``FAMILIES``. What several families have in
common is in ``shared``. ``unets`` and ``unsupported`` are no families: they describe UNets, and transformers
that are refused.

``adapters/registry.py`` looks adapters up. Tests: tests/adapters/test_transformers.py and test_pipelines.py,
which run each on a tiny model (``-k mochi``); tests/test_lift_out.py fails if a file has no line in ``FAMILIES``.
"""

from __future__ import annotations

from importlib import import_module

from para_core.adapters.adapter import Adapter

# The families in the order in which messages and pages list their pipelines.
FAMILIES = (
    "flux",
    "hunyuan_video",
    "mochi",
    "cogvideox",
    "wan",
    "wan_animate",
    "skyreels",
    "anyflow",
    "qwen_image",
    "ltx",
    "stable_diffusion_3",
    "auraflow",
    "cogview",
    "hidream",
    "hunyuan_image",
    "easyanimate",
    "joyimage",
    "motif",
    "pixart",
    "dit",
    "prx",
    "allegro",
    "helios",
    "latte",
    "nucleus",
    "hunyuan_dit",
    "flux_relatives",
    "z_image",
    "bria_fibo2",
    "krea2",
    "ernie_image",
    "ideogram",
    "omnigen",
    "lumina",
    "minimax_h3",
    "kandinsky",
    "cosmos",
    "audio",
    "sana",
)


def adapters_of(family: str) -> list[Adapter]:
    """Return the adapters that are global variables of the module ``family``, in their order there.

    So a family must not import the adapter of another one: it would be listed twice.
    """
    module = import_module(f"{__name__}.{family}")
    return [value for value in vars(module).values() if isinstance(value, Adapter)]


ADAPTERS: tuple[Adapter, ...] = tuple(adapter for family in FAMILIES for adapter in adapters_of(family))
