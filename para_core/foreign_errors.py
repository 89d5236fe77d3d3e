"""Classify exceptions of other libraries: by type if the library has one, otherwise by message.

Messages were read in torch 2.11, 2.13 and 2.15 and in Ray 2.5x; tests/test_foreign_errors.py has the sentence of each.
"""

from __future__ import annotations

import re

import torch.distributed as dist

from para_core.torch_internals import TorchDynamoException

# gloo raises plain RuntimeErrors: for a collective that times out or whose peer ends, ...
_LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")
# ... and for any later collective of a group in which that happened before.
_CLOSED = ("pair closure", "connection closed", "connection reset")
# The first form is that of torch before 2.15, the second names no lengths.
_MASK_LENGTHS = r"block_mask was created for (?:\S+.*?kv_len=\d+|a (?:smaller|larger) length than you're using it for)"


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective or the store got no answer from another rank."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _LOST)


def is_closed_connection(error: BaseException) -> bool:
    """Whether a collective failed because the connections of its group were closed before it."""
    return isinstance(error, RuntimeError) and _says(error, _CLOSED)


def is_data_dependent(error: BaseException) -> bool:
    """Whether Dynamo could not trace something that depends on the values of tensors. It has several types for this."""
    return isinstance(error, TorchDynamoException) and _says(error, ("data-dependent",))


def mask_length_mismatch(error: BaseException | None) -> str | None:
    """Return what flex_attention says of a block mask whose lengths are not those of query and key; None for any other
    error.
    """
    # A ValueError before torch 2.15, a RuntimeError since; in a graph an exception of Dynamo.
    if not isinstance(error, Exception):
        return None
    compared = re.search(_MASK_LENGTHS, str(error), re.DOTALL)
    return None if compared is None else compared.group()


def is_slow_start_of_ray(error: BaseException) -> bool:
    """Whether a node of Ray did not start in time, for which Ray raises a bare ``Exception``."""
    return type(error) is Exception and _says(error, ("timed out",))


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)
