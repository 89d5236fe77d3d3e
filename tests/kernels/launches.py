"""The launches that every run compiles: those in 16 bits, with head dims that are no power of two or the largest, for
the oldest and the newest GPU.
"""

from typing import Any

import pytest

from tests.kernels.compiled import ARCHS, Launch, launches

on_each_arch = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in (min(ARCHS), max(ARCHS)) else pytest.mark.long) for arch in ARCHS]
)


def by_use(*kernels: Any, rounded: bool = False) -> list[Any]:
    """Return the launches of ``kernels`` as test parameters. ``rounded`` selects those of an 8-bit exchange."""
    return [
        pytest.param(launch, id=launch.name, marks=pytest.mark.slow if _is_short(launch) else pytest.mark.long)
        for launch in launches()
        if launch.kernel in kernels and launch.rounded == rounded
    ]


def _is_short(launch: Launch) -> bool:
    _, of_a_head_dim, head_dim = launch.name.partition("D = ")
    # These are a padded row and the row that needs most registers. An exchange in 8 bits has each in one format.
    dims = {"int8": ("96",), "e4m3": ("256",)}.get(launch.name.partition(" as ")[2].partition(",")[0], ("96", "256"))
    return launch.common and (not of_a_head_dim or head_dim in dims)
