"""Recognise exceptions of torch and Ray: by type if the library has a type for the case, else by message.

The messages are those of torch 2.11, 2.13 and 2.15 and of Ray 2.5x. tests/test_foreign_errors.py has an
example of each. What follows from an error is decided by the callers, such as
:mod:`para_core.distributed.agree`.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from para_core.torch_internals import TorchDynamoException

# The RuntimeError of gloo contains one of these if a collective times out, or if another rank's process ends.
_LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")
# The RuntimeError of gloo contains one of these if an earlier collective of the same group has failed in this
# way.
_CLOSED = ("pair closure", "connection closed", "connection reset")
# The first alternative, with the lengths, is flex_attention's message before torch 2.15. The second is the
# message since then, and ends before the lengths.
_MASK_LENGTHS = (
    r"block_mask was created for (?:\S+.*?kv_len=\d+|a (?:smaller|larger) length than you're using it for)"
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective or a call of the store failed because another rank did not answer, or ended."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # "CUDA error: out of memory" is that of pinned host memory, for example; the others are those of the
    # host.
    return isinstance(error, RuntimeError) and _says(
        error, ("error: out of memory", "not enough memory", "can't allocate")
    )


def is_out_of_patience(error: BaseException) -> bool:
    """Whether a collective, or one wait for it, took longer than it was given."""
    return isinstance(error, RuntimeError) and _says(error, ("timed out",))


def is_closed_connection(error: BaseException) -> bool:
    """Whether a collective failed because the connections of its group had already been closed."""
    return isinstance(error, RuntimeError) and _says(error, _CLOSED)


def is_data_dependent(error: BaseException) -> bool:
    """Whether Dynamo raised ``error`` because the traced code depends on the values of tensors.

    The message is compared, because Dynamo has several exception types for this case.
    """
    return isinstance(error, TorchDynamoException) and _says(error, ("data-dependent",))


def mask_length_mismatch(error: BaseException | None) -> str | None:
    """Return flex_attention's message if ``error`` says that a block mask has the wrong lengths; else None."""
    # The type does not identify this error: flex_attention raises a ValueError before torch 2.15 and a
    # RuntimeError since then, and in a graph Dynamo raises its own exception.
    if not isinstance(error, Exception):
        return None
    compared = re.search(_MASK_LENGTHS, str(error), re.DOTALL)
    if compared is None:
        return None
    return compared.group()


def sizes_that_differ(error: BaseException) -> set[int]:
    """Return the numbers in the message of torch that sizes do not fit together; empty for other errors."""
    if not isinstance(error, (RuntimeError, IndexError)) or not _says(error, ("size", "shape")):
        return set()
    return {int(number) for number in re.findall(r"\d+", str(error))}


def is_slow_start_of_ray(error: BaseException) -> bool:
    """Whether Ray gave up because a Ray node did not start in time.
    Ray raises a plain ``Exception`` for this.
    """
    return type(error) is Exception and _says(error, ("timed out",))


def is_ray_running_already(error: BaseException) -> bool:
    """Whether ``ray.init`` refused the options of a new cluster because it has found a running one.
    Ray also raises ValueError for an invalid ``RAY_ADDRESS``.
    """
    return isinstance(error, ValueError) and _says(error, ("existing cluster",))


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)
