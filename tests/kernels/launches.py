"""The launches that are compiled: those of 16 bits in every run, the others in the long one."""

from typing import Any

import pytest

from benchmarks.kernel_resources import launches


def by_use(*kernels: Any) -> list[Any]:
    """Those of these kernels, as values of a test's parameter."""
    found = [launch for launch in launches() if launch.kernel in kernels]
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(launch, id=launch.name, marks=marks[launch.common]) for launch in found]
