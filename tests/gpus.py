"""A stand-in for a GPU that this process does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock


@contextmanager
def gpu_named(name: str, memory: float = 85e9) -> Iterator[None]:
    """Make ``torch.cuda`` report one GPU of this name and with this memory."""
    gpu = SimpleNamespace(total_memory=memory)
    functions = {"get_device_name": lambda index: name, "get_device_properties": lambda index: gpu}
    with mock.patch.multiple("torch.cuda", current_device=lambda: 0, **functions):
        yield
