"""Guess the block stack of a model from one observed call: which lists of blocks there are, and what they
pass on.

``stack.py`` calls it, compares the guess with further calls, and has it checked. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from para_core.adapters.propose.conditions import guess_conditions
from para_core.adapters.propose.records import ModuleCall, TensorRecord, tensors_of
from para_core.adapters.propose.region import ObservedRegion
from para_core.adapters.propose.start import streams_of
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.torch_internals import tree_leaves


def guess_blocks(region: ObservedRegion) -> CachedBlocks | None:
    """Return the block stack of the observed model: the module lists from the start of ``region`` that call
    attention.

    Return None if there is no such list, or if a block returns a tensor that updates none of its parameters.
    """
    groups: list[_ObservedGroup] = []
    for name, calls in _lists_with_attention(region):
        streams = _parameter_names(streams_of(calls))
        # An output that updates no parameter has the name "".
        if not streams or not all(streams):
            return None
        group = _group_of(region, name, calls, streams)
        if groups and groups[-1].is_continued_by(group):
            groups[-1] = groups[-1].join(group)
        else:
            groups.append(group)
    if not groups:
        return None
    conditions = guess_conditions(region.small, region.large)
    return CachedBlocks(tuple([group.block_group() for group in groups]), conditions=conditions)


def _lists_with_attention(region: ObservedRegion) -> Iterator[tuple[str, list[ModuleCall]]]:
    """Yield the lists of blocks from the start on, with their calls.

    A list in which nothing calls attention holds modules that are no transformer blocks, such as norms.
    """
    for name in region.small.list_names():
        calls = region.small.calls_in_list(name)
        if calls[0].began >= region.began and region.small.attends(calls):
            yield name, calls


def _group_of(
    region: ObservedRegion, name: str, calls: list[ModuleCall], streams: tuple[str, ...]
) -> _ObservedGroup:
    """Return the blocks of the list ``name`` as a group of their own."""
    starts = [_parameter_name(stream) for stream in region.start.streams]
    # The dim of the samples in the streams is 1 for [S, B, C], and 0 otherwise.
    has_samples_in_dim_1 = region.start.dim == 0 and region.samples() is not None
    return _ObservedGroup(
        lists=(name,),
        calls=tuple(calls),
        streams=streams,
        measured=next((stream for stream in starts if stream in streams), streams[0]),
        chained=is_chained(calls, streams),
        samples=int(has_samples_in_dim_1),
    )


@dataclass(frozen=True)
class _ObservedGroup:
    """Blocks that run one after the other on the same streams. The attributes are those of
    :class:`BlockGroup`.

    ``calls`` are the calls of the blocks of all ``lists``, in the order of time.
    """

    lists: tuple[str, ...]
    calls: tuple[ModuleCall, ...]
    streams: tuple[str, ...]
    measured: str
    chained: bool
    samples: int

    def is_continued_by(self, group: _ObservedGroup) -> bool:
        """Whether the first block of ``group`` receives what the last block of this group returns."""
        return self.streams == group.streams and _passes_on(self.calls[-1], group.calls[0], group.streams)

    def join(self, group: _ObservedGroup) -> _ObservedGroup:
        """Return this group with the blocks of ``group`` after its own.

        Both are part of one chain, so ``measured`` and ``samples`` are those of this group.
        """
        is_link_chained = is_chained([self.calls[-1], group.calls[0]], self.streams)
        return replace(
            self,
            lists=(*self.lists, *group.lists),
            calls=(*self.calls, *group.calls),
            chained=self.chained and group.chained and is_link_chained,
        )

    def block_group(self) -> BlockGroup:
        return BlockGroup(self.lists, self.streams, self.measured, chained=self.chained, samples=self.samples)


def is_chained(calls: Sequence[ModuleCall], streams: tuple[str, ...]) -> bool:
    """Whether the model only passes the streams from block to block, with equal other arguments for all
    blocks.

    ``calls`` are in the order of time, and of one call of the model, because tensors are compared by identity.
    """
    if not all(_passes_on(call, following, streams) for call, following in pairwise(calls)):
        return False
    others = [_other_arguments(call, streams) for call in calls]
    return all(other == others[0] for other in others)


def _passes_on(call: ModuleCall, following: ModuleCall, streams: tuple[str, ...]) -> bool:
    """Whether the streams of the ``following`` call are the output of ``call``, in the order of ``streams``.

    A stream whose fields are several arguments counts with these in the order of the call.
    """
    received = []
    for stream in streams:
        values = [value for name, value in following.arguments.items() if _parameter_name(name) == stream]
        received += [record.identity for record in tensors_of(values)]
    return received == [record.identity for record in tensors_of(call.output)]


def _other_arguments(call: ModuleCall, streams: tuple[str, ...]) -> list[Any]:
    """Return the identities of the tensors that are no streams, and other values as text, in order of the
    names.
    """
    values = [value for name, value in sorted(call.arguments.items()) if _parameter_name(name) not in streams]
    # As texts, because other values may be compared by identity or return no bool, such as arrays.
    return [x.identity if isinstance(x, TensorRecord) else repr(x) for x in tree_leaves(values)]


def _parameter_names(streams: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters of ``streams``, with one entry for all fields of a dataclass.

    The cache names a dataclass as a whole.
    """
    parameters: list[str] = []
    for stream in streams:
        parameter = _parameter_name(stream)
        # Only the fields of a dataclass are merged: each other output keeps a name of its own.
        if "." not in stream or parameter not in parameters:
            parameters.append(parameter)
    return tuple(parameters)


def _parameter_name(name: str) -> str:
    """Return the parameter of the argument ``name``, which may be the path of a field."""
    parameter, _, _ = name.partition(".")
    return parameter
