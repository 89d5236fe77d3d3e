"""Calls of attention, tiny models and tiny pipelines on simulated GPUs, with their counts and errors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import para_core
from para_core import UnifiedAttnMode
from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)
from tests.simulated_gpu.ranks import on_gpu
from tests.tiny import flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.transformers.registry import MODELS

# Budgets limit these. Each is counted per rank.
KINDS = ("waits", "copies to the device", "copies to the host", "launches", "collectives")


@dataclass(frozen=True)
class Call:
    """A call on several ranks: its error against the unmodified model, and what it does more often than that.

    ``lines`` has the added waits and copies by line.
    """

    error: float
    added: dict[str, float]
    lines: dict[str, dict[str, int]]


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class _Counted:
    """The tensors that a call returned, in float32 on the CPU, and its counts."""

    out: list[Tensor]
    counts: Counter[str]
    lines: dict[str, Counter[str]]


def _counted(call: Callable[[], Any]) -> _Counted:
    from tests.simulated_gpu.native import on_cpu
    from tests.simulated_gpu.record import measured

    with measured() as counts:
        out = call()
    leaves = [torch.from_numpy(np.array(x)) if isinstance(x, (Image, np.ndarray)) else x for x in tree_leaves(out)]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return _Counted([(on_cpu(x) if x.is_cuda else x).float().clone() for x in tensors], counts.counts, counts.lines)


def _compared(parallel: _Counted, alone: _Counted) -> Call:
    error = max(relative_error(x, y) for x, y in zip(parallel.out, alone.out, strict=True))
    added = {kind: parallel.counts[kind] - alone.counts[kind] for kind in KINDS}
    lines = {
        kind: dict(parallel.lines.get(kind, Counter()) - alone.lines.get(kind, Counter()))
        for kind in ("waits", "copies to the device", "copies to the host")
    }
    return Call(error, added, lines)


# -- Attention.


@dataclass(frozen=True)
class Attention:
    """One intercepted call. Sizes are those of the whole sequence."""

    ring: int
    ulysses: int
    mask: str = "none"
    tokens: int = 101
    heads: int = 8
    key_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    grad: bool = False
    mode: str = "unified"
    options: tuple[tuple[str, Any], ...] = ()


def attend(case: Attention) -> Call:
    """Call SDPA under the mode, the second time counted. ``added`` has all counts: nothing is subtracted."""
    torch.manual_seed(0)
    shapes = [(2, heads, case.tokens, case.dim) for heads in (case.heads, case.key_heads, case.key_heads)]
    qkv = [on_gpu(torch.randn(shape), case.dtype) for shape in shapes]
    mask = on_gpu(_mask(case))
    options: dict[str, Any] = {"is_causal": case.mask == "causal", "enable_gqa": case.key_heads != case.heads}
    same_dtype = mask.to(case.dtype) if mask is not None and mask.is_floating_point() else mask
    local = _counted(lambda: F.scaled_dot_product_attention(*qkv, same_dtype, **options))
    with _mode(case) as cp:
        with torch.no_grad():
            parts = [cp.shard(x, dim=2) for x in qkv]
        for x in parts:
            x.requires_grad_(case.grad)

        def call() -> Tensor:
            out = F.scaled_dot_product_attention(*parts, mask, **options)
            if case.grad:
                out.sum().backward()
            return out.detach()

        call()
        counted = _counted(call)
        out = call()
        with torch.no_grad():
            whole = _counted(lambda: cp.gather(out, dim=2))
    lines = {kind: dict(counted.lines.get(kind, {})) for kind in ("waits", "copies to the device")}
    error = relative_error(whole.out[0], local.out[0])
    return Call(error, {kind: counted.counts[kind] for kind in KINDS}, lines)


def _mode(case: Attention) -> UnifiedAttnMode:
    mesh, options = mesh_of(ring=case.ring, ulysses=case.ulysses), dict(case.options)
    if case.mode == "block-sparse":
        blocks = -(-case.tokens // 16)
        # All blocks are seen, so the result is exact.
        return para_core.BlockSparseAttnMode(
            mesh, torch.ones(blocks, blocks, dtype=torch.bool), block_size=16, **options
        )
    if case.mode == "half of the keys":
        return para_core.SparseKVAttnMode(mesh, share=0.5, **options)
    return UnifiedAttnMode(mesh, **options)


def _mask(case: Attention) -> Tensor | None:
    if case.mask == "keys":
        return (torch.arange(case.tokens) < case.tokens - 7)[None, None, None].expand(2, 1, 1, -1)
    if case.mask == "bool":
        return torch.rand(2, 1, case.tokens, case.tokens) > 0.3
    if case.mask == "float":
        return torch.randn(2, 1, case.tokens, case.tokens).to(case.dtype)
    if case.mask == "finite":
        hidden = torch.rand(2, 1, case.tokens, case.tokens) > 0.7
        return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(case.dtype).min).to(case.dtype)
    if case.mask == "float32":
        return torch.randn(2, 1, case.tokens, case.tokens)
    return None


# -- Transformers.


def call_transformer(name: str, ring: int, ulysses: int, dtype: torch.dtype = torch.float32) -> Call:
    """Call a model once to warm up and once counted, alone and on the mesh."""
    frames = 6 if name == "cogvideox 1.5" else 3
    model = MODELS[name].build().to("cuda", dtype)

    def call() -> _Counted:
        # Some models change their arguments.
        kwargs = on_gpu(MODELS[name].inputs(frames, 6, 10), dtype)
        return _counted(lambda: model(**kwargs, return_dict=False))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()
        alone = call()
        parallelize_transformer(model, mesh=mesh_of(ring=ring, ulysses=ulysses))
        call()
        parallel = call()
        unparallelize_transformer(model)
    return _compared(parallel, alone)


# -- Pipelines.

# The steps of a generation, and those that a longer one has in addition.
STEPS = MORE_STEPS = 2


@dataclass(frozen=True)
class Generation:
    """A generation, and one step as the difference of two generations of different lengths."""

    whole: Call
    step: Call


def _tiny(name: str) -> tuple[Any, dict[str, Any]]:
    if name == "flux":
        call = {"prompt": "a red circle", "height": 48, "width": 32, "output_type": "pt"}
        return flux_pipe(shared_parts=False), call
    pipeline = UNET_PIPELINES[name] if name in UNET_PIPELINES else PIPELINES[name]
    return pipeline.build(), pipeline.call()


def _on_gpu(name: str, dtype: torch.dtype, quantize: bool) -> tuple[Any, dict[str, Any]]:
    """Return a tiny pipeline on this rank's GPU, and the arguments of a call."""
    pipe, call = _tiny(name)
    pipe.to("cuda", dtype)
    if quantize:
        quantize_(pipe.transformer, Int8WeightOnlyConfig())
    pipe.set_progress_bar_config(disable=True)
    return pipe, on_gpu(call, dtype)


def _generate(pipe: Any, call: dict[str, Any], steps: int) -> Any:
    # A generator of the CPU: its numbers are the same on every rank.
    return pipe(**{**call, "num_inference_steps": steps, "generator": torch.Generator().manual_seed(7)})[0]


@dataclass(frozen=True)
class _Generations:
    """A whole generation, and two of which only the steps count: they end with latents."""

    whole: _Counted
    short: _Counted
    long: _Counted


def _generations(pipe: Any, call: dict[str, Any], steps: int) -> _Generations:
    latents = {**call, "output_type": "latent"}
    return _Generations(
        _counted(lambda: _generate(pipe, call, steps)),
        _counted(lambda: _generate(pipe, latents, steps)),
        _counted(lambda: _generate(pipe, latents, steps + MORE_STEPS)),
    )


@cache
def _generated_alone(name: str, dtype: torch.dtype, quantize: bool, steps: int) -> _Generations:
    """Return the generations of the unmodified pipeline. A rank runs several cases, so they are kept."""
    return _generations(*_on_gpu(name, dtype, quantize), steps)


def generate(
    name: str,
    mesh: dict[str, int] | None = None,
    threshold: float | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> Generation:
    """Generate with a tiny pipeline, alone and with ``options`` of ``parallelize_pipe``.

    Args:
        threshold: that of First Block Cache, which the pipeline alone does not get.
        quantize: whether the transformer has torchao's int8 weights, each way.
        steps: of the generation.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = _generated_alone(name, dtype, quantize, steps)
        pipe, call = _on_gpu(name, dtype, quantize)
        if mesh is not None:
            options["mesh"] = mesh_of(**mesh)
        parallelize_pipe(pipe, **options)
        if threshold is not None:
            apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
        _generate(pipe, call, 1)
        parallel = _generations(pipe, call, steps)
        # Nothing undoes sharded weights and stages.
        if options.get("weights") is None and "pipe" not in (mesh or {}):
            unparallelize_pipe(pipe)
    long = _compared(parallel.long, alone.long)
    short = _compared(parallel.short, alone.short)
    step = {kind: (long.added[kind] - short.added[kind]) / MORE_STEPS for kind in KINDS}
    return Generation(_compared(parallel.whole, alone.whole), Call(long.error, step, {}))


def generate_once(name: str) -> Call:
    """Generate with a tiny pipeline by the call that it has, alone and on all ranks."""
    pipe, call = _on_gpu(name, torch.float32, False)

    def once() -> _Counted:
        # Some pipelines and schedulers draw from the default generator.
        torch.manual_seed(0)
        return _counted(lambda: pipe(**{**call, **new_generator(call)})[0])

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = once()
        parallelize_pipe(pipe)
        parallel = once()
        unparallelize_pipe(pipe)
    return _compared(parallel, alone)


def generate_alone(name: str) -> None:
    """Generate with an unmodified tiny pipeline."""
    pipe, call = _on_gpu(name, torch.float32, False)
    with torch.no_grad():
        pipe(**{**call, **new_generator(call)})


def new_generator(call: dict[str, Any]) -> dict[str, Any]:
    """Return a generator in its first state, if the call has one."""
    return {"generator": torch.Generator().manual_seed(7)} if "generator" in call else {}
