"""Calls of attention, tiny models and tiny pipelines on simulated GPUs, with their counts and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
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
from tests.simulated_gpu.native import on_cpu
from tests.simulated_gpu.ranks import on_gpu
from tests.simulated_gpu.record import Record, measured
from tests.tiny import flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.transformers.registry import MODELS

# Budgets limit these. Each is counted per rank.
KINDS = ("waits", "copies to the device", "copies to the host", "launches", "collectives")
# The tensors that a call returned, in float32 on the CPU, and its counts.
Counted = tuple[list[Tensor], Record]


@dataclass(frozen=True)
class Call:
    """A call on several ranks: its error against the unmodified model, and what it adds, also by line."""

    error: float
    added: dict[str, float]
    lines: dict[str, dict[str, int]]


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _counted(call: Callable[[], Any]) -> Counted:
    with measured() as counts:
        out = call()
    tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    return [(on_cpu(x) if x.is_cuda else x).float().clone() for x in tensors], counts


def _compared(parallel: Counted, alone: Counted) -> Call:
    (results, counts), (expected, own) = parallel, alone
    error = max(relative_error(x, y) for x, y in zip(results, expected, strict=True))
    added = {kind: counts.counts[kind] - own.counts[kind] for kind in KINDS}
    return Call(error, added, {kind: dict(counts.lines[kind] - own.lines[kind]) for kind in KINDS})


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
    expected, _ = _counted(lambda: F.scaled_dot_product_attention(*qkv, same_dtype, **options))
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
        _, counts = _counted(call)
        out = call()
        with torch.no_grad():
            whole, _ = _counted(lambda: cp.gather(out, dim=2))
    return _compared((whole, counts), (expected, Record()))


def _mode(case: Attention) -> UnifiedAttnMode:
    mesh, options = mesh_of(ring=case.ring, ulysses=case.ulysses), dict(case.options)
    if case.mode == "block-sparse":
        blocks = -(-case.tokens // 16)
        # All blocks are seen, so the result is exact.
        return para_core.BlockSparseAttnMode(mesh, torch.ones(blocks, blocks).bool(), block_size=16, **options)
    if case.mode == "half of the keys":
        return para_core.SparseKVAttnMode(mesh, share=0.5, **options)
    return UnifiedAttnMode(mesh, **options)


def _mask(case: Attention) -> Tensor | None:
    shape = 2, 1, case.tokens, case.tokens
    if case.mask == "keys":
        return (torch.arange(case.tokens) < case.tokens - 7)[None, None, None].expand(2, 1, 1, -1)
    if case.mask == "bool":
        return torch.rand(shape) > 0.3
    if case.mask == "finite":
        return torch.zeros(shape).masked_fill(torch.rand(shape) > 0.7, torch.finfo(case.dtype).min).to(case.dtype)
    if case.mask in ("float", "float32"):
        return torch.randn(shape).to(case.dtype if case.mask == "float" else torch.float32)
    return None


def call_transformer(name: str, ring: int, ulysses: int) -> Call:
    """Call a model once to warm up and once counted, alone and on the mesh."""
    frames = 6 if name == "cogvideox 1.5" else 3
    model = MODELS[name].build().to("cuda")

    def call() -> Counted:
        # Some models change their arguments.
        kwargs = on_gpu(MODELS[name].inputs(frames, 6, 10), torch.float32)
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


def _on_gpu(name: str, dtype: torch.dtype, quantize: bool) -> tuple[Any, dict[str, Any]]:
    """Return a tiny pipeline on this rank's GPU, and the arguments of a call."""
    pipe, call = flux_pipe(shared_parts=False), {"prompt": "a red circle", "height": 48, "width": 32}
    if name != "flux":
        pipe, call = PIPELINES[name].build(), PIPELINES[name].call()
    pipe.to("cuda", dtype)
    if quantize:
        quantize_(pipe.transformer, Int8WeightOnlyConfig())
    pipe.set_progress_bar_config(disable=True)
    return pipe, on_gpu({**call, "output_type": "pt"}, dtype)


def _generate(pipe: Any, call: dict[str, Any], steps: int) -> Any:
    # A generator of the CPU: its numbers are the same on every rank.
    return pipe(**{**call, "num_inference_steps": steps, "generator": torch.Generator().manual_seed(7)})[0]


def _generations(pipe: Any, call: dict[str, Any], lengths: Sequence[int]) -> list[Counted]:
    return [_counted(lambda steps=steps: _generate(pipe, call, steps)) for steps in lengths]


@cache
def _generated_alone(name: str, dtype: torch.dtype, quantize: bool, lengths: tuple[int, ...]) -> list[Counted]:
    """Return the generations of the unmodified pipeline. A rank runs several cases, so they are kept."""
    return _generations(*_on_gpu(name, dtype, quantize), lengths)


def generate(
    name: str,
    mesh: dict[str, int] | None = None,
    threshold: float | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: bool = False,
    steps: int = 2,
    longer_by: int = 0,
    **options: Any,
) -> list[Call]:
    """Generate with a tiny pipeline, alone and with ``options`` of ``parallelize_pipe``. A second generation has
    ``longer_by`` more steps, if any. The pipeline alone has quantized weights too, but no cache.
    """
    lengths = (steps, steps + longer_by) if longer_by else (steps,)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = _generated_alone(name, dtype, quantize, lengths)
        pipe, call = _on_gpu(name, dtype, quantize)
        if mesh is not None:
            options["mesh"] = mesh_of(**mesh)
        parallelize_pipe(pipe, **options)
        if threshold is not None:
            apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
        _generate(pipe, call, 1)
        parallel = _generations(pipe, call, lengths)
        # Nothing undoes sharded weights and stages.
        if options.get("weights") is None and "pipe" not in (mesh or {}):
            unparallelize_pipe(pipe)
    return [_compared(*pair) for pair in zip(parallel, alone, strict=True)]
