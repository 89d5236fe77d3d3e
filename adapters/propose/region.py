"""The part of a model in which tokens may be sharded, as it was observed in a smaller and in a larger call.

``propose.py`` makes a region for each possible start; the files that guess rules read it. Tests:
tests/adapters/propose/test_attention_rules.py and test_structures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from para_core.adapters.propose.records import (
    ModuleCall,
    ObservedAttention,
    ObservedCall,
    ObservedSoftmax,
    TensorRecord,
    output_tensors,
)
from para_core.adapters.propose.start import Lengths, Start
from para_core.plans.plan import Gather

# Name of the segment of text tokens, which the candidate plans replicate.
TEXT = "text"


@dataclass(frozen=True)
class TextParameter:
    """The parameter of the first block that holds the text of a joint sequence, its token dim and length."""

    name: str
    dim: int
    length: int


@dataclass(frozen=True)
class Ending:
    """A module call at whose output tokens may be gathered, with a rule for each output tensor."""

    call: ModuleCall
    gathers: tuple[Gather | None, ...]


@dataclass(frozen=True)
class _TokenOutput:
    """An output tensor with an entry for each token, its index in the output, and the rule that gathers it."""

    record: TensorRecord
    index: int
    gather: Gather


def _output_rules(call: ModuleCall, tensors: Sequence[_TokenOutput]) -> tuple[Gather | None, ...]:
    """Return the rules for the outputs of ``call``: one tensor of a tuple can be gathered.

    If the whole output is a dataclass, all of its fields can.
    """
    first, *others = tensors
    gathers = [first.gather]
    if first.gather.field and len(call.output) == 1:
        gathers += [tensor.gather for tensor in others]
    return (*[None] * first.index, *gathers)


@dataclass(frozen=True)
class ObservedRegion:
    """The same part of the model in a smaller and in a larger call: everything from a :class:`Start` on.

    Tensors of the smaller call that were computed from the tokens are ``derived``. Plans name the tokens
    ``segment``.
    """

    start: Start
    small: ObservedCall
    large: ObservedCall
    segment: str

    def calls(self) -> list[tuple[ModuleCall, ModuleCall]]:
        """Return the module calls from the start on in the order of time, as pairs (smaller call, larger
        call).

        Calls are paired by their order. If the larger call runs other modules, a pair is of different ones: a
        guess from it is wrong, and the check of the plan refutes it.
        """
        pairs = zip(self.small.calls, self.large.calls, strict=False)
        return sorted([pair for pair in pairs if pair[0].began >= self.began], key=lambda pair: pair[0].began)

    @property
    def _first_call(self) -> ModuleCall:
        return next(call for call in self.small.calls if call.name == self.start.block)

    @property
    def began(self) -> int:
        """The time of the start in the smaller call."""
        return self._first_call.began

    def attention_pairs(self) -> list[tuple[ObservedAttention, ObservedAttention]]:
        """Return the attention calls of the whole model by their order, as pairs (smaller call, larger call).

        The names of a pair differ if other modules attend in the larger call, or in another order. Calls that
        only the longer record has are left out.
        """
        return [*zip(self.small.attention, self.large.attention, strict=False)]

    def endings(self) -> list[Ending]:
        """Return where the tokens may be gathered, the latest call first.

        Calls with an output larger than the tokens come last: logits over a vocabulary cost more to gather
        than what they are computed from, and some models compute them for the last token only.
        """
        calls = self.calls()
        size = prod(self._first_stream().shape)
        last_block = max((call.ended for call, _ in calls if call.block_list is not None), default=0)
        small: list[Ending] = []
        large: list[Ending] = []
        for call, larger_call in reversed(calls):
            if call.ended < last_block:
                continue
            tensors = self._token_outputs(call, larger_call)
            if not tensors:
                continue
            ending = Ending(call, _output_rules(call, tensors))
            if prod(tensors[0].record.shape) > size:
                large.append(ending)
            else:
                small.append(ending)
        return [*small, *large]

    def _token_outputs(self, call: ModuleCall, larger_call: ModuleCall) -> list[_TokenOutput]:
        """Return the output tensors of ``call`` that have an entry for each token, in one dim."""
        tensors = []
        outputs = zip(output_tensors(call.output), output_tensors(larger_call.output), strict=False)
        for output, larger in outputs:
            dims = self.start.token_dims(output.record, larger.record)
            if output.record.derived and len(dims) == 1:
                gather = Gather(dims[0], self.segment, field=output.path)
                tensors.append(_TokenOutput(output.record, output.index, gather))
        return tensors

    def _first_stream(self) -> TensorRecord:
        record: TensorRecord = self._first_call.arguments[self.start.streams[0]]
        return record

    def text_parameter(self) -> TextParameter | None:
        """Return the parameter of the first block that holds the text of a joint sequence.

        None if no parameter of the block is as long as the part of the keys that does not grow.
        """
        small, large = self.start.tokens
        lengths = {
            attention.keys - small
            for attention, larger in self.attention_pairs()
            if attention.name == larger.name and attention.keys - small == larger.keys - large
        }
        for name, value in self._first_call.arguments.items():
            if not isinstance(value, TensorRecord) or len(value.shape) != 3 or name in self.start.streams:
                continue
            for dim in (1, 0):
                if value.shape[dim] in lengths:
                    return TextParameter(name, dim, value.shape[dim])
        return None

    def samples(self) -> int | None:
        """Return the number of samples in the smaller call.

        None if the tokens at the start have no batch dim.
        """
        shape, dim = self._first_stream().shape, self.start.dim
        if self.start.together:
            return shape[0] if dim == 1 else None
        if len(shape) == 3 and dim < 2:
            return shape[1 - dim]
        return None

    def segments_of(self, lengths: Lengths, *, text_first: bool) -> tuple[str, ...] | None:
        """Return the segments that make up a sequence of ``lengths`` in the two calls; None if no segments
        fit.

        ``text_first`` says whether replicated text precedes the tokens in a joint sequence.
        """
        if lengths in (self.start.tokens, self.start.entries):
            return (self.segment,)
        small, large = lengths
        if small == large:
            return (TEXT,)
        tokens, larger_tokens = self.start.tokens
        if small - tokens == large - larger_tokens > 0:
            return (TEXT, self.segment) if text_first else (self.segment, TEXT)
        return None

    def handwritten_softmaxes(self) -> list[ObservedSoftmax]:
        """Return the softmaxes over scores of tokens, one for each module, that a plan would leave to one
        rank.

        They are computed from the tokens, before these are gathered, and the model's output is computed from
        them.
        """
        ends = max((ending.call.ended for ending in self.endings()), default=0)
        by_module: dict[str, ObservedSoftmax] = {}
        for index, softmax in enumerate(self.small.softmaxes):
            is_lost = softmax.derived and softmax.is_used and softmax.time < ends
            if is_lost and self._is_over_scores(index, softmax):
                by_module.setdefault(softmax.name, softmax)
        return [*by_module.values()]

    def _is_over_scores(self, index: int, softmax: ObservedSoftmax) -> bool:
        """Whether the softmax, which has this index in the smaller call, is over scores of tokens."""
        *_, rows, columns = softmax.shape
        larger = self.large.softmaxes
        grows = index < len(larger) and larger[index].shape[-1] != columns
        return grows or rows == columns or columns >= self.start.tokens[0]
