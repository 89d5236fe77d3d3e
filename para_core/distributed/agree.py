"""Agreement of ranks, so that invalid input on one of them raises on every one.

A rank that raises alone would leave the others in a collective until the group's timeout. With gloo, tensors
of unexpected sizes even abort the process. So in eager code ranks agree at each boundary, and every verdict
comes from data that is equal on all of them:

- :func:`agree` where a call begins or a setting changes: all ranks bring the same record, or all raise.
- :func:`together` around a step that may fail on one rank: then it fails on all.

:func:`exchange` and :func:`broadcast_bytes` compare nothing: they serve callers whose ranks hold different
values by right. All this travels between the hosts, while their devices go on; tensors of devices travel by
:mod:`.collectives`.

**Protocol.** Records are compared by digest:

1. One all-gather per mesh dim sends a header per rank. It contains the digest of the record, its length in
   bytes (negative if this rank found its input invalid; the record then contains the error), and up to
   ``MOST_NUMBERS`` integers that may differ between ranks, for example the sizes of a mask. If no rank
   reports an error and all digests are equal, the agreement ends here.
2. Otherwise the ranks gather the records themselves, padded to the longest one. All ranks have the same
   headers, so either all ranks reach this step or none. Every rank then raises the same error, or finds that
   only the JSON differs (1 and 1.0), but not the values, and continues.

Records that differ are described by :mod:`.records`, and late ranks by :mod:`.late_ranks`. Tests:
tests/distributed/test_agree.py and tests/test_bad_input.py.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.distributed.collectives import all_gather_into
from para_core.distributed.groups import host_group
from para_core.distributed.late_ranks import PATIENCE, Unanswered, wait_for_late_ranks
from para_core.distributed.mesh import AnyMesh, MeshDim
from para_core.distributed.records import Record, Signature, describe_first_difference
from para_core.foreign_errors import is_closed_connection
from para_core.torch_internals import DisableTransforms

MOST_NUMBERS = 3
# A header contains a digest and the length of the record, and then the numbers.
_START = struct.Struct("<16sq")
_NUMBERS = struct.Struct(f"<{MOST_NUMBERS}q")
_HEADER = struct.Struct(f"{_START.format}{MOST_NUMBERS}q")


class HostGroups:
    """The process groups that send CPU tensors among the ranks of a mesh, looked up once and cached.

    A caller that often exchanges bytes passes this object in place of the mesh to the functions of this
    file, which look up the groups in the first exchange: ``by_dim`` is empty until then, and
    :func:`all_gather_bytes` fills it, by names of mesh dims, which differ within a mesh. It is of no use after
    ``destroy_process_group()``, like its mesh: whoever makes the mesh again also makes this object again.
    """

    def __init__(self, mesh: AnyMesh) -> None:
        self.dims = tuple([dim for dim in mesh.dims if dim.size > 1])
        self.by_dim: dict[str, dist.ProcessGroup] = {}


AgreeingRanks = AnyMesh | HostGroups

# The exceptions that keep their type on the other ranks. Others, including subclasses of these such as
# ModuleNotFoundError, become a ValueError in agree() and exchange(), which take the errors of invalid input, and a
# RuntimeError in together(), whose step may fail for any reason.
_KINDS = (TypeError, ValueError, ImportError, RuntimeError)
# An exception that was raised on all ranks of a mesh has an attribute of this name, which lists the mesh's
# process groups, so that an outer together() over the same ranks does not exchange it again.
_RAISED_ON = "_para_core_raised_on"
# A tensor into which all_gather_bytes() gathers has an attribute of this name.
_IS_RECORD = "_para_core_is_record"


def agree(
    record: Record | Signature | Exception,
    ranks: AgreeingRanks,
    numbers: Sequence[int] = (),
    *,
    explain: Callable[[list[Record]], str] = describe_first_difference,
    call: str = "this call",
) -> list[tuple[int, ...]]:
    """Return the ``numbers`` of every rank, in rank order. Collective; raise on all ranks unless they agree.

    Args:
        record: A dict of JSON values that must be equal on all ranks, or its :class:`Signature`, which saves
            time if the same record is compared repeatedly. A rank whose input is invalid passes the exception
            that it would otherwise raise alone.
        ranks: Those that agree. Every one of them must call this function.
        numbers: At most ``MOST_NUMBERS`` 64-bit integers that may differ between ranks. How many there are
            must be the same on all ranks with the same record.
        explain: Returns the error message if the records differ, given the records of all ranks in order.
        call: The user's call that every rank must make, such as "the FluxPipeline", for the log if ranks are
            late.

    Raises:
        ValueError: The records of two ranks differ.
        TypeError, ValueError, ImportError, RuntimeError: The exception of the first rank that passed one,
            with the index of that rank in the mesh in its message. Other types become a ValueError, as do
            numbers that do not fit into a header; a record that is no JSON becomes a TypeError or ValueError.
        Unanswered: A rank did not make the call within the timeout, or has ended.
    """
    # An error of this rank that is raised before the exchange would leave the other ranks waiting.
    packed_numbers = bytes(_NUMBERS.size)
    try:
        packed_numbers = _NUMBERS.pack(*numbers, *[0] * (MOST_NUMBERS - len(numbers)))
    except struct.error as error:
        if not isinstance(record, Exception):
            record = ValueError(
                f"the numbers of this rank are {list(numbers)}; expected at most {MOST_NUMBERS} of 64 bits: {error}."
            )
    if not isinstance(record, (Signature, Exception)):
        try:
            record = Signature.of(record)
        except (TypeError, ValueError) as error:
            record = error
    failed = isinstance(record, Exception)
    if isinstance(record, Exception):
        record = Signature.of(_record_of_error(record))
    length = len(record.encoded)
    if failed:
        length = -length
    header = _START.pack(record.digest, length) + packed_numbers
    lengths, digests, numbers_of_ranks = [], set(), []
    for digest, length_of_rank, *numbers_of_rank in _HEADER.iter_unpack(
        _all_gather_rows(header, ranks, call)
    ):
        lengths.append(length_of_rank)
        digests.add(digest)
        numbers_of_ranks.append(tuple(numbers_of_rank[: len(numbers)]))
    if min(lengths) >= 0 and len(digests) == 1:
        return numbers_of_ranks
    encoded = _all_gather_data(record.encoded, lengths, ranks, call)
    try:
        _raise_first_error(encoded, lengths)
        records = [json.loads(data) for data in encoded]
        # Compare values, not digests, because equal values may have different JSON: 1 and 1.0.
        if any(record_of_rank != records[0] for record_of_rank in records):
            raise ValueError(explain(records))
    except _KINDS as error:
        # All ranks raise here. Unanswered is a RuntimeError and would be marked too, but only exchanges raise
        # it, and there is no exchange inside this try.
        setattr(error, _RAISED_ON, _groups_of(ranks))
        raise
    return numbers_of_ranks


_NOTHING_WRONG = Signature.of({})


@contextmanager
def together(ranks: AnyMesh, what: str, *, call: str = "this call") -> Iterator[None]:
    """Return a context manager that raises an exception of one rank on all ``ranks``, with ``what`` as
    prefix.

    Collective at its end: every rank must enter the context. Contexts over the same ranks may be nested: an
    exception that an inner context has raised on all ranks is not exchanged again. If a rank fails before it
    enters an inner context, its exchange at the end of the outer context meets the exchange with which the
    other ranks end the inner one. ``call`` names the user's call for the log if ranks are late.

    If a step inside is collective, it begins with an :func:`agree`, :func:`exchange` or context over the same
    ``ranks``, in which the other ranks meet a rank that has failed before. Any other collective, such as one
    over fewer mesh dims or the creation of a process group, comes before or after the context.

    An exception that is no ``Exception``, such as ``KeyboardInterrupt``, ends the context without an
    exchange: the other ranks wait for this one until the timeout.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: That of the rank that failed. Other types become a
            RuntimeError. If ``ranks`` is one rank, its exception of any type is raised as it is.
        Unanswered: A rank did not take part within the timeout, or has ended.
    """
    try:
        yield
    except Exception as error:
        raise_on_all_ranks(error, ranks, what, call=call)
    agree(_NOTHING_WRONG, ranks, call=call)


def raise_on_all_ranks(error: Exception, ranks: AnyMesh, what: str, *, call: str = "this call") -> NoReturn:
    """Raise ``error``, an exception of this rank, on all ``ranks``, with ``what`` as prefix. Collective.

    The other ranks take part by their next :func:`agree` or :func:`together`, which then raises. If they all
    have raised this error already, or there are none, it is raised again as it is, without an exchange.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: The error. Other types become a RuntimeError, except
            on one rank.
        Unanswered: The other ranks did not take part, or ``error`` itself, if it is one and they do not either.
    """
    if _groups_of(ranks) in ((), getattr(error, _RAISED_ON, None)):
        raise error
    kind: type[Exception] = type(error)
    reason = str(error)
    if kind not in _KINDS:
        kind = RuntimeError
        reason = f"{type(error).__name__}: {error}"
    try:
        # This always raises, because it is given an exception.
        agree(kind(f"{what}: {reason}"), ranks, call=call)
    except Unanswered:
        # The first exchange without an answer has named the late ranks. One after it only finds its
        # connections closed.
        if not isinstance(error, Unanswered):
            raise
    raise error


def exchange(value: Any, ranks: AnyMesh) -> list[Any]:
    """Return the ``value`` of every rank, in rank order. Collective.

    It is no agreement: the values differ by right, such as the shapes of each rank's tiles or its host. They
    are pickled and of any length, so they do not fit into the numbers of :func:`agree`, and cost two
    all-gathers per mesh dim. An exception in place of a value raises on all ranks, as in :func:`agree`; so
    does a value that cannot be pickled, as a TypeError.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: The exception of the first rank that passed one.
            Other types become a ValueError.
        Unanswered: A rank did not take part within the timeout, or has ended.
    """
    data = b""
    if not isinstance(value, Exception):
        try:
            data = pickle.dumps(value)
        except Exception as error:
            value = TypeError(f"a {type(value).__name__} of this rank cannot be pickled: {error}")
    length = len(data)
    if isinstance(value, Exception):
        data = json.dumps(_record_of_error(value)).encode()
        length = -len(data)
    # The header is that of agree(), because another rank may have failed before and meet this exchange there.
    header = _START.pack(bytes(16), length) + bytes(_NUMBERS.size)
    lengths = [number for _, number, *_ in _HEADER.iter_unpack(_all_gather_rows(header, ranks))]
    gathered = _all_gather_data(data, lengths, ranks)
    try:
        _raise_first_error(gathered, lengths)
    except _KINDS as error:
        setattr(error, _RAISED_ON, _groups_of(ranks))
        raise
    return [pickle.loads(data) for data in gathered]


def broadcast_bytes(x: Tensor, mesh: AnyMesh) -> Tensor:
    """Return the ``x`` of the first rank of ``mesh``. For eager code only. Collective.

    ``x`` is a uint8 CPU tensor of the same length on all ranks. It is meant for few bytes: it is gathered from
    all ranks of each mesh dim, and all but the first are dropped.
    """
    for dim in mesh.dims:
        x = all_gather_bytes(x, dim)[: x.numel()]
    return x


def _record_of_error(error: Exception) -> Record:
    return {"error": str(error), "kind": type(error).__name__}


def _raise_first_error(encoded: list[bytes], lengths: list[int]) -> None:
    """Raise the first error among the ``encoded`` records of all ranks, if any, with the rank's index in the
    mesh.

    A negative length marks an error.
    """
    kinds = {kind.__name__: kind for kind in _KINDS}
    for rank, length in enumerate(lengths):
        if length < 0:
            record = json.loads(encoded[rank])
            kind = kinds.get(record["kind"], ValueError)
            raise kind(f"mesh rank {rank}: {record['error']}")


def _groups_of(ranks: AgreeingRanks) -> tuple[str, ...]:
    """Return the names of the process groups that connect ``ranks``; none if there is one rank."""
    return tuple([dim.group_name for dim in ranks.dims if dim.size > 1])


def _all_gather_data(
    data: bytes, lengths: list[int], ranks: AgreeingRanks, call: str = "this call"
) -> list[bytes]:
    """Return the ``data`` of all ranks, whose sizes are the magnitudes of ``lengths``. Collective."""
    size = max(map(abs, lengths))
    gathered = _all_gather_rows(data.ljust(size), ranks, call)
    return [gathered[rank * size :][: abs(length)] for rank, length in enumerate(lengths)]


def _all_gather_rows(row: bytes, ranks: AgreeingRanks, call: str = "this call") -> bytes:
    """Return the concatenation of ``row`` from all ranks, in their order. All rows have the same length.
    Collective.

    The order is that of the mesh only because ``ranks.dims`` has the innermost dim first: each dim
    concatenates what the dims before it have gathered.
    """
    by_dim = None
    if isinstance(ranks, HostGroups):
        by_dim = ranks.by_dim
    # Disable torch.func transforms, because the function being transformed does not depend on these bytes.
    with DisableTransforms():
        rows = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        for dim in ranks.dims:
            if dim.size == 1:
                continue
            try:
                rows = all_gather_bytes(rows, dim, by_dim, call=call)
            except Unanswered:
                raise
            except RuntimeError as error:
                raise Unanswered(_describe_silence(dim, error)) from error
        return rows.numpy().tobytes()


def all_gather_bytes(
    x: Tensor, dim: MeshDim, by_dim: dict[str, dist.ProcessGroup] | None = None, *, call: str = "this call"
) -> Tensor:
    """Return the concatenation of ``x`` from all ranks of ``dim``, in rank order. For eager code only.
    Collective.

    ``x`` is a uint8 CPU tensor of the same length on all ranks. The host waits for the other ranks, but not
    for the device, because the group of :func:`~para_core.distributed.groups.host_group` sends the bytes
    between CPUs. The groups in ``by_dim`` (of :class:`HostGroups`) are used; a missing group is looked up and
    added. ``call`` names the user's call for the log if ranks are late.
    """
    if dim.size == 1:
        return x
    group = None if by_dim is None else by_dim.get(dim.name)
    if group is None:
        group = host_group(dim)
        if by_dim is not None:
            by_dim[dim.name] = group
    gathered = x.new_empty(dim.size * x.numel())
    setattr(gathered, _IS_RECORD, True)
    work = all_gather_into(gathered, x, group=group, async_op=True)
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        wait_for_late_ranks(work, error, dim, group, call)
    if group is not dim.group:
        # The ranks of a new group are sorted, while dim.group may have another order. Restore the order of
        # dim.group.
        rows = [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(dim.group)]
        gathered = gathered.view(dim.size, -1)[rows].flatten()
    return gathered


def is_record(gathered: Tensor) -> bool:
    """Whether :func:`all_gather_bytes` gathers into this tensor, whose dtype alone does not tell: an attention in 8
    bits gathers bytes, too.
    """
    return hasattr(gathered, _IS_RECORD)


def _describe_silence(dim: MeshDim, error: RuntimeError) -> str:
    """Return a message for a failed collective over ``dim``: the likely reason for ``error``, and what to do."""
    if not is_closed_connection(error):
        return (
            f"no answer from all {dim.size} ranks of mesh dim {dim.name!r} within the group's timeout. Every rank must "
            "make this call, not one under 'if rank == 0'. If they all do, another rank raised an exception or died "
            "(its log has the reason), or was slow (set a larger timeout=)."
        )
    default = ""
    if dim.group is dist.group.WORLD:
        default = "It is the default group, which a new mesh over all ranks would use again. "
    return (
        f"the connections of mesh dim {dim.name!r} are closed: a rank has ended, perhaps because it did not make this "
        "call, which every rank must make, or an earlier call over the process group timed out, on this rank or "
        f"another; gloo does not reopen them. {default}If all processes are alive, call "
        "torch.distributed.destroy_process_group() and init_process_group() on each, create the mesh again, and "
        "parallelize with it; otherwise restart them."
    )
