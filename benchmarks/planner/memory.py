"""Memory of a rank, predicted and counted by PyTorch's CPU allocator:  python -m benchmarks.planner.memory

- memory_check.json (docs/planner.md): one transformer call on CPU ranks, for 12 meshes: the bytes of weights that the
  rank holds, and the largest sum of what the allocator gave out during the call. Models: a stack of FLUX.1's blocks of
  real size (bfloat16), and small FLUX and Wan transformers with many tokens (float32).
- encode_first.json (docs/command.md), with ``--encode-first``: 50 prompts on two CPU ranks as `para_core generate
  --prompts` runs them: the bytes of weights that a rank would hold on its device while prompts are encoded and while
  images are denoised, with the text encoders kept and with the prompts encoded first. A small FLUX whose text encoders
  have the same share of the weights as those of FLUX.1.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only
from transformers import T5Config, T5EncoderModel

from benchmarks.cache.ways import load
from benchmarks.harness import markdown_table, measure_on_ranks, parser_of, read_results, write_results
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe
from para_core.adapters.planner.count import count_call, count_weights, without_data
from para_core.adapters.planner.inputs import make_inputs
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.predict import memory_of
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import GenerationSizes, Workload
from para_core.fleet.build import build
from para_core.fleet.encode_first import EncodeFirst, encode_batches
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe
from para_core.weights.fsdp import is_sharded
from para_core.weights.parameters import plain_tensors


@dataclass(frozen=True)
class Stack:
    """A transformer whose call is measured, with the size of a generation.

    Args:
        meshes: pairs of dims, and whether fsdp shards the weights over the sequence ranks.
    """

    cls: str
    config: dict[str, Any]
    sizes: GenerationSizes
    meshes: tuple[tuple[dict[str, int], bool], ...]
    dtype: torch.dtype = torch.float32


STACKS = {
    "FLUX.1, 1 + 2 blocks of real size, bfloat16": Stack(
        "FluxTransformer2DModel",
        {"num_layers": 1, "num_single_layers": 2, "guidance_embeds": True},
        GenerationSizes(512, 512, 1, 128),
        (({}, False), ({"ulysses": 2}, False), ({"tensor": 2}, False), ({"ulysses": 2}, True)),
        torch.bfloat16,
    ),
    "small FLUX, float32": Stack(
        "FluxTransformer2DModel",
        {
            "num_layers": 4,
            "num_single_layers": 8,
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "joint_attention_dim": 256,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (16, 24, 24),
        },
        GenerationSizes(1024, 1024, 1, 128),
        (({}, False), ({"ring": 2}, False), ({"tensor": 2}, False), ({"pipe": 2}, False), ({"ring": 2}, True)),
    ),
    "small Wan, float32": Stack(
        "WanTransformer3DModel",
        {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "text_dim": 256},
        GenerationSizes(512, 512, 9, 128),
        (({}, False), ({"ulysses": 2}, False), ({"tensor": 2}, False)),
    ),
}
NUM_PROMPTS = 50


def transformer_of(stack: Stack) -> Any:
    """Return the transformer with random weights."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(stack.dtype)
    try:
        return getattr(diffusers, stack.cls)(**stack.config).eval()
    finally:
        torch.set_default_dtype(before)


def predicted(stack: Stack, dims: dict[str, int], fsdp: bool) -> float:
    """Return the bytes of a rank that the planner predicts."""
    transformer = transformer_of(stack)
    with without_data(stack.dtype):
        call = count_call(transformer, stack.sizes)
    work = Workload("", stack.sizes, 1, count_weights(transformer, [], vae=0.0, other=0.0), call)
    return memory_of(replace(MeshShape(**dims), fsdp=fsdp), work, Placement())


def zeros_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of the shape of ``x``, and of ``dtype`` if ``x`` has fractions."""
    return torch.zeros_like(x, dtype=dtype if x.is_floating_point() else x.dtype)


def measured(name: str, dims: dict[str, int], fsdp: bool) -> dict[str, Any]:
    """Return the bytes of weights on this rank, and the largest sum that a call has allocated at once."""
    stack = STACKS[name]
    transformer = transformer_of(stack)
    is_flux = stack.cls.startswith("Flux")
    others = ("text_encoder_2", "tokenizer_2") if is_flux else ()
    pipe = (FluxPipeline if is_flux else WanPipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer,
        **dict.fromkeys(("vae", "text_encoder", "tokenizer", *others)),
    )
    if dims:
        mesh = init_context_parallel_mesh("cpu", **{f"max_{dim}_dim_size": size for dim, size in dims.items()})
        weights: Any = "fsdp" if fsdp else "tensor" if "tensor" in dims else None
        parallelize_pipe(pipe, mesh=mesh, weights=weights)
    # They are equal on all ranks.
    inputs = tree_map_only(torch.Tensor, partial(zeros_of, dtype=stack.dtype), make_inputs(transformer, stack.sizes))
    with torch.no_grad():
        transformer(**inputs, return_dict=False)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            transformer(**inputs, return_dict=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    assert is_sharded(transformer) == fsdp
    return {"weights": held_by(transformer), "allocated": max(totals) - min(0, *totals)}


def held_by(*modules: torch.nn.Module) -> int:
    """Return the bytes of memory that this rank's parameters occupy."""
    tensors: list[Any] = [part for module in modules for x in module.parameters() for part in plain_tensors(x)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors if not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def encoded_first(folder: str, encodes_first: bool, count: int) -> dict[str, int]:
    """Return the largest bytes of weights on this rank's device in each phase, and those of the kept embeddings."""
    encode_first = EncodeFirst(call_pipe)
    pipe = build(Recipe(folder, mesh=(("ring", 2),)), encode_first if encodes_first else None)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    held = {"encoding": 0, "denoising": 0, "embeddings": 0}

    def record(phase: str, *_: Any) -> None:
        held[phase] = max(held[phase], held_by(*parts))

    # Inside a part that does not run, a parameter has one element.
    pipe.text_encoder_2.encoder.register_forward_pre_hook(partial(record, "encoding"))
    pipe.transformer.x_embedder.register_forward_pre_hook(partial(record, "denoising"))
    fields = {"height": 48, "width": 64, "num_inference_steps": 1, "max_sequence_length": 64}

    def fail(_: Line, error: Exception) -> None:
        raise error

    lines = [Line(seed, Request({**fields, "prompt": f"{seed} red circles"}, seed)) for seed in range(count)]
    for batch in encode_batches(lines, encode_first, fail):
        held["embeddings"] = max(held["embeddings"], encode_first.waiting_bytes)
        for line in batch:
            call_pipe(pipe, [line.request])
    return held


def write_pipeline(folder: str) -> None:
    """Write the small FLUX with a T5 that has 0.4 × the bytes of the transformer, as FLUX.1 has (9.5 and 23.8 GB)."""
    pipe = load()
    config, wanted = pipe.text_encoder_2.config, 0.4 * held_by(pipe.transformer)
    shallow, deeper = (T5EncoderModel(T5Config(**{**config.to_dict(), "num_layers": layers})) for layers in (1, 2))
    layers = 1 + round((wanted - held_by(shallow)) / (held_by(deeper) - held_by(shallow)))
    pipe.text_encoder_2 = T5EncoderModel(T5Config(**{**config.to_dict(), "num_layers": layers}))
    pipe.save_pretrained(folder)


def encode_first_parts() -> dict[str, list[str]]:
    """Return the table of docs/command.md."""
    cells = []
    for row in read_results("encode_first")["rows"]:
        figures = [f"{row[phase] / 1e6:.1f}" for phase in ("encoding", "denoising", "embeddings")]
        cells.append([row["text encoders"], *figures])
    heads = ["text encoders", "encoding, MB", "denoising, MB", "embeddings in host memory, MB"]
    return {"encode first": markdown_table(heads, cells, right=range(1, 4))}


def parts() -> dict[str, list[str]]:
    """Return the table of docs/planner.md: the errors of the prediction, a row for each mesh."""
    rows, last = [], ""
    for row in read_results("memory_check")["rows"]:
        rows.append([row["stack"] if row["stack"] != last else "", row["mesh"], f"{row['error']:+.1%}"])
        last = row["stack"]
    return {"memory": markdown_table(["model", "mesh", "error of the predicted bytes"], rows, right=(2,))}


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--encode-first", action="store_true", help="measure a file of 50 prompts instead")
    args = parser.parse_args()
    if args.encode_first:
        with tempfile.TemporaryDirectory() as folder:
            write_pipeline(folder)
            rows = [
                {"text encoders": name, **measure_on_ranks(encoded_first, 2, folder, encodes_first, NUM_PROMPTS)}
                for name, encodes_first in (("kept on the device", False), ("freed after encoding", True))
            ]
        print(*rows, write_results("encode_first", {"prompts": NUM_PROMPTS, "rows": rows}, "diffusers"), sep="\n")
        return
    rows = []
    for name, dims, fsdp in ((name, *mesh) for name, stack in STACKS.items() for mesh in stack.meshes):
        mesh = (", ".join(f"{dim} {size}" for dim, size in dims.items()) or "one rank") + ", fsdp" * fsdp
        own = measure_on_ranks(measured, MeshShape(**dims).ranks, name, dims, fsdp)
        counted, foreseen = own["weights"] + own["allocated"], predicted(STACKS[name], dims, fsdp)
        row = {"stack": name, "mesh": mesh, "weights": own["weights"], "allocated": own["allocated"]}
        rows.append({**row, "predicted": foreseen, "error": foreseen / counted - 1})
        figures = f"{counted / 1e6:8.1f} {foreseen / 1e6:8.1f} MB {foreseen / counted - 1:+.1%}"
        print(f"{name:45} {mesh:20} {figures}", flush=True)
    print(write_results("memory_check", {"rows": rows}, "diffusers"))


if __name__ == "__main__":
    main()
