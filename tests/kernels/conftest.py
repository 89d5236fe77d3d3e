"""The process in which Triton's kernels are interpreted."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Run kernels on the CPU: ``interpreter(function, *args)``."""
    process = Interpreter()
    yield process
    process.close()
