"""Kernels without a GPU: a process in which Triton interprets them, with NumPy on the CPU.

Triton reads the setting when it is imported, and torch imports Triton. This process cannot have it, because kernels and
Inductor compile here.
"""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch


class Interpreter:
    """``interpreter(function, *args)`` returns the result of a module's function in that process. Arguments and results
    travel by value.
    """

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}):
            self._process.submit(_begin).result()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _load(self._process.submit(_run, _save((function, args, kwargs))).result())

    def close(self) -> None:
        """End the process."""
        self._process.shutdown(cancel_futures=True)


def _begin() -> None:
    from tests.rank_pool import fill_uninitialized_memory

    torch.set_num_threads(1)
    fill_uninitialized_memory()


def _run(job: bytes) -> bytes:
    function, args, kwargs = _load(job)
    return _save(function(*args, **kwargs))


def _save(value: Any) -> bytes:
    # Multiprocessing's own way to send tensors passes file descriptors.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
