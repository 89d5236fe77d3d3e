"""Run or skip the transformer blocks of one model call, and decide in between whether to skip them.

The hooks of :mod:`.attachment` call this for each block, in the order in which the model runs them: a block
that ``opens`` comes first, the one that ``decides`` before any block that may be skipped. The rule is in
:mod:`.decision`. Tests: tests/cache/test_options.py, tests/cache/test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from para_core.cache.block_roles import BlockRole
from para_core.cache.decision import DecisionInput, DecisionOutcome, NumberDecider, Verdict
from para_core.cache.streams import Streams
from para_core.instance.private_class import original_class
from para_core.plans.current_call import allow_skipped_attention_of
from para_core.torch_internals import version_of

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache


def run_first_block(
    cache: BlockCache,
    role: BlockRole,
    block: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a block that is never skipped, and return its output. After the last one, decide the step.

    Collective if it decides, see :func:`decide`, or if there are pipeline stages.
    """
    streams = role.read(args, kwargs)
    if role.opens:
        cache.before = streams.tensors
    output = call(block, *args, **kwargs)
    if not role.decides:
        return output
    if cache.stages is not None:
        # With pipeline stages only one stage has run the block. The other stages pass its input.
        output = cache.stages.send_from_owner(block, output)
    outputs = role.require_outputs(block, streams.tensors, output)
    before = cache.before
    if before is None:
        raise left_out(cache.module)
    cache.before = None
    index = role.measured_index
    if not streams.are_plain:
        index = role.find_changed(streams.arguments, before, outputs)
    decide(cache, outputs[index] - before[index])
    return output


def run_or_skip_block(
    cache: BlockCache,
    role: BlockRole,
    block: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run or skip a block that may be skipped, and return its output.

    The output of a skipped block is its input or, in a graph, may be an uninitialised tensor. Only the last
    block of a group returns the forecast output of the group. ``cache.skip`` is compared by identity, because
    in a graph it is a tensor.
    """
    streams = role.read(args, kwargs)
    if role.opens and cache.blocks.modulated is not None:
        arguments = {**dict(zip(role.parameters, args, strict=False)), **kwargs}
        decide(cache, cache.blocks.modulated(block, arguments))
    state = cache.state
    residuals = state.groups[role.group]
    if cache.entries is None:
        raise left_out(cache.module)
    if role.enters:
        inputs = streams.tensors
        if torch.compiler.is_compiling():
            inputs = _copy_floats(inputs)
        elif cache.skip is None:
            residuals.marks = _marks_of(inputs)
        cache.entries[role.group] = inputs
    entries = cache.entries[role.group]
    if entries is None:
        raise left_out(cache.module)
    if cache.skip is None or cache.skip is False:
        output = call(block, *args, **kwargs)
        if role.exits:
            outputs = role.require_outputs(block, streams.tensors, output)
            if cache.skip is None and not torch.compiler.is_compiling():
                _check_not_written(block, role, entries, residuals.marks)
            residuals.store(entries, outputs, in_graph=state.decider.in_graph)
    elif cache.skip is True:
        tensors = streams.tensors
        if role.exits:
            tensors = residuals.forecast(entries, state.decider.weights(cache.options, cache.step))
        output = role.as_output(streams, tensors)
    else:
        output = cache.traced.run_block(role, block, entries, call, args, kwargs)
    if role.exits:
        cache.entries[role.group] = None
    return output


def _copy_floats(tensors: Streams) -> Streams:
    """Return copies of the tensors that get residuals, because a graph cannot notice that a block writes to them.

    Inductor drops the copies that nothing needs.
    """
    copies = list(tensors)
    for index, x in enumerate(tensors):
        if x is not None and (x.is_floating_point() or x.is_complex()):
            copies[index] = x.clone()
    return tuple(copies)


def left_out(module: nn.Module) -> RuntimeError:
    """Return (not raise) the error that a call of ``module`` has not run a block without which nothing is
    decided, stored or added.
    """
    return RuntimeError(
        f"a call of {original_class(module).__name__} left out block 0, or the first or last block of a group, and "
        "there the cache decides, or stores and adds residuals. Name the argument that leaves it out in "
        "CachedBlocks(uncached=...), or remove the cache."
    )


def _marks_of(tensors: Streams) -> list[int | Tensor]:
    """Return, for each tensor, what later shows whether it was written to: its version counter or, in
    inference mode, which has none, a copy.
    """
    return [x.clone() if x.is_inference() else version_of(x) for x in tensors if x is not None]


def _is_written(x: Tensor, mark: int | Tensor) -> bool:
    """Whether ``x`` was written to since it had this ``mark``."""
    if isinstance(mark, Tensor):
        return not bool(torch.isclose(x, mark, rtol=0.0, atol=0.0, equal_nan=True).all())
    return version_of(x) != mark


def _check_not_written(
    block: nn.Module, role: BlockRole, entries: Streams, marks: list[int | Tensor]
) -> None:
    """Raise ``ValueError`` if the blocks of the group have written to ``entries``, its inputs, since these
    had ``marks``: the residual of a stream that is written in place would be 0. Checked at the first step.

    In inference mode the host waits for the device.
    """
    tensors = [x for x in entries if x is not None]
    if any(map(_is_written, tensors, marks)):
        raise ValueError(
            f"blocks up to this {original_class(block).__name__} write in place to a stream that they get "
            f"({', '.join(role.streams)}), so the cache cannot tell what they add to it. Let them return new tensors "
            "(x = x + y in place of x += y), or pass them copies, by a forward pre-hook of each block."
        )


def decide(cache: BlockCache, residual: Tensor) -> None:
    """Decide whether to skip the remaining blocks. Set ``cache.skip`` to a bool, in a graph to a bool tensor.

    ``skip`` is None, and the blocks run, if no earlier step can be compared with this one. ``residual``
    is the tensor that the rule compares: the first-block residual or the modulated input of the first
    block. Collective over the ranks that share the sequence or the batch, unless the outcome is known.
    """
    state = cache.state
    traced = torch.compiler.is_compiling()
    sample = residual.detach()[..., :: cache.options.downsample].movedim(cache.blocks.groups[0].samples, 0)
    # Some models pass tokens as ``[S, C]``, so add a batch dim of 1.
    if sample.dim() < 3:
        sample = sample[None]
    samples = sample.shape[0]
    sharing = None
    if cache.region is not None and cache.region.sharing_samples:
        sharing = cache.region.sharing_samples[-1]
        samples *= sharing.size
    inputs = DecisionInput(
        sample=sample,
        samples=samples,
        options=cache.options,
        step=cache.step,
        threshold=cache.threshold,
        dims=cache.dims,
        sharing=sharing,
    )
    cache.entries = [None] * len(cache.blocks.groups)
    decider = state.decider
    if (
        decider is None
        or decider.in_graph != traced
        or decider.first.shape != sample.shape
        or decider.first.dtype != sample.dtype
        or decider.first.device != sample.device
    ):
        cache.skip = None
        cache.outcome = DecisionOutcome(None, Verdict.WARMUP, 0, samples)
        state.drop_residuals()
        if traced:
            state.decider = cache.traced.begin(inputs)
        else:
            state.decider = NumberDecider(inputs)
    elif traced:
        cache.traced.decide(inputs)
    else:
        cache.skip, cache.outcome = decider.decide(inputs)
        if cache.skip:
            allow_skipped_attention_of(cache.region)
