"""The launches that are compiled: those of 16 bits in every run, the others in the long one."""

from typing import Any

import pytest

from benchmarks.attention.compiled import launches


def by_use(*kernels: Any, rounded: bool = False) -> list[Any]:
    """Those of these kernels, as values of a test's parameter; ``rounded``: of an exchange in 8 bits."""
    found = [launch for launch in launches() if launch.kernel in kernels and launch.rounded == rounded]
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(launch, id=launch.name, marks=marks[launch.common]) for launch in found]
