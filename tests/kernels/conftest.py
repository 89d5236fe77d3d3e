"""The process in which Triton's kernels are interpreted."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Return ``interpreter(function, *args)``, which runs kernels on the CPU."""
    process = Interpreter()
    yield process
    process.close()
