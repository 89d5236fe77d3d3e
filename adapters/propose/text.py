"""Text that is sharded as the image is: where a plan that keeps it on every rank may shard it, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from para_core.adapters.propose.candidates import WHOLE, Candidate, Region, grown_dims, tensors_of
from para_core.adapters.propose.observe import Seen
from para_core.plans.plan import Entries, Plan, ShardRule, Split

_WHY = (
    "text, in one sequence with the tokens. Sharded, too, it leaves less to compute on each rank; with text='replicate' less is sent. "
    "Both were exact; which is faster, only a measurement tells"
)


def with_sharded_text(region: Region, plan: Plan) -> Iterator[Candidate]:
    """Variants of ``plan`` that shard the text of its joint sequences, too; none where all text is attended to as keys only.

    Sharded where the first block is given it, or, with all else that has an entry for each token, where the model itself is: then what
    the model makes of it (positions of text and image in one tensor) is sharded as well.
    """
    text = region.whole_stream()
    if text is None or plan.cuts(WHOLE):
        return
    parameter, dim = text
    tokens = region.length(text)
    at_blocks = _at_blocks(region, plan, parameter, dim, tokens)
    if at_blocks is not None:
        yield Candidate(at_blocks, (f"{region.start.block}({parameter}): {_WHY}.",))
    at_inputs = _at_inputs(region, plan, tokens)
    if at_inputs is not None:
        names = [name for name, cut in at_inputs.inputs.items() if isinstance(cut, Split) and cut.segment == WHOLE]
        yield Candidate(at_inputs, (f"{' and '.join(names)}: {_WHY}.",))


def _at_blocks(region: Region, plan: Plan, parameter: str, dim: int, tokens: int) -> Plan | None:
    """None where a tensor has entries for text and image: no part of it is one of both."""
    inner: dict[str, dict[str | int, ShardRule]] = {name: dict(cuts) for name, cuts in plan.inner.items()}
    if any(_joins_text(cut) for cuts in inner.values() for cut in cuts.values()):
        return None
    inner[region.start.block][parameter] = Split(dim, segment=WHOLE)
    for call, _ in region.calls():
        if call.block_list is None:
            continue
        for name, value in call.given.items():
            if (call.name, name) == (region.start.block, parameter):
                continue
            of_text = _cut_of_text(value, tokens)
            place = f"{call.block_list}.*"
            if of_text is not None:
                inner.setdefault(place, {})[name] = _both(inner.get(place, {}).get(name), of_text)
    return replace(plan, inner=inner)


def _joins_text(cut: ShardRule | None) -> bool:
    if isinstance(cut, Entries):
        return any(_joins_text(one) for one in cut.cuts)
    return isinstance(cut, Split) and (cut.after is not None or cut.then_replicated)


def _cut_of_text(value: Any, tokens: int) -> Split | Entries | None:
    """Of what has an entry for each token of text, and is not made of the image's."""
    if isinstance(value, Seen):
        dims = [dim for dim, size in enumerate(value.shape) if size == tokens]
        return Split(dims[0], like=WHOLE) if len(dims) == 1 and not value.derived else None
    if not isinstance(value, (list, tuple)):
        return None
    cuts = [_cut_of_text(one, tokens) for one in value]
    splits = [cut for cut in cuts if isinstance(cut, Split)]
    if not splits:
        return None
    if len(splits) == len(cuts) and len({repr(cut) for cut in splits}) == 1:
        return splits[0]
    return Entries(tuple(cut if isinstance(cut, Split) else None for cut in cuts))


def _both(of_image: ShardRule | None, of_text: Split | Entries) -> ShardRule:
    """Of a tuple, some entries go with the image and others with text."""
    if not (isinstance(of_image, Entries) and isinstance(of_text, Entries)):
        return of_text
    return Entries(tuple(one or other for one, other in zip(of_image.cuts, of_text.cuts, strict=True)))


def _at_inputs(region: Region, plan: Plan, tokens: int) -> Plan | None:
    """None where the model is given no tokens, but makes them itself."""
    inputs: dict[str, ShardRule] = {}
    for name, value in region.small.inputs.items():
        cut = _cut_of_input(value, region.large.inputs.get(name), region, tokens)
        if cut is not None:
            inputs[name] = cut
    segments = {cut.segment for cut in inputs.values() if isinstance(cut, Split)}
    return replace(plan, inputs=inputs, inner={}) if segments == {region.segment, WHOLE} else None


def _cut_of_input(value: Any, other: Any, region: Region, tokens: int) -> Split | None:
    found: set[Split] = set()
    pairs = [*zip(tensors_of(value), tensors_of(other), strict=False)]
    for one, larger in pairs:
        grown = grown_dims(one, larger)
        dims = [dim for dim, pair in grown.items() if pair == region.start.tokens]
        if len(dims) == 1 and len(grown) == 1:
            found.add(Split(dims[0], segment=region.segment))
        of_text = [dim for dim, size in enumerate(one.shape) if size == tokens and not grown]
        if len(of_text) == 1:
            found.add(Split(of_text[0], segment=WHOLE))
    return found.pop() if len(found) == 1 else None
