"""Triton's kernels run on the CPU in every test of this folder."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreted import interpreted


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield
