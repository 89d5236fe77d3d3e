"""Explain errors of tensors for all tokens that the rules of a plan do not shard.

``Region.run`` calls this with an error that the model has raised. Nothing is checked before a call. Tests:
tests/plans/test_attention_check.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import SequenceMesh
from para_core.foreign_errors import sizes_that_differ
from para_core.layout.sequence import Segment


def explain_whole_tensor(
    error: BaseException,
    model: str,
    parameters: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    segments: Sequence[Segment],
    mesh: SequenceMesh,
) -> None:
    """Raise ``ValueError`` if ``error`` says that sizes differ, and a dict among the arguments holds a tensor
    with an entry for each token of a sharded segment, which may be why. Otherwise add a note to ``error`` if
    it names this rank's number of tokens, and that of all.

    A plan has no rules for the entries of dicts such as ``joint_attention_kwargs``, because the processors
    decide what they are. ``args`` and ``kwargs`` are those of a call of ``model``, whose positional
    parameters are ``parameters``.
    """
    if torch.compiler.is_compiling():
        return
    sizes = sizes_that_differ(error)
    totals = {
        segment.total: segment for segment in segments if not segment.replicated and segment.total in sizes
    }
    if not totals:
        return
    arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
    dicts = {name: value for name, value in arguments.items() if isinstance(value, Mapping)}
    for name, x in [found for of_dict in dicts.items() for found in _tensors_in(*of_dict)]:
        for size in x.shape:
            if size in totals:
                segment = totals[size]
                size_on_rank = segment.size(mesh.rank, mesh.ranks)
                raise ValueError(
                    f"{model} was given {name} {list(x.shape)}, with an entry for each of the {size} {segment.name} "
                    f"tokens; this rank holds {size_on_rank} of them, and entries of this argument are not sharded. "
                    "This is not supported on several ranks. Leave it out, apply it to the inputs or the output of the "
                    "transformer, or run on one rank: unparallelize_pipe(pipe)."
                ) from error
    for total, segment in totals.items():
        size_on_rank = segment.size(mesh.rank, mesh.ranks)
        if size_on_rank in sizes:
            error.add_note(
                f"{model}: this rank holds {size_on_rank} of the {total} {segment.name} tokens, and something has an "
                f"entry for each of the {total}: an argument, a mask or a table that the plan does not shard. Say in "
                "the plan how (propose_plan, with an example that has the argument), leave it out, or run on one rank: "
                "unparallelize_transformer(transformer)."
            )


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, each with its expression, such as ``name['b'][0]``."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", entry)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", entry)
