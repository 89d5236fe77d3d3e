"""para_core beside diffusers' own context parallelism, on each model that both take: is it exact, and how long is a step?

    python -m benchmarks.beside_diffusers

Two ranks of one thread, the models of `benchmarks.tiny_models` with four heads, once with tokens and text of even numbers, which
diffusers asks for, and once with odd ones (there with its `ulysses_anything`). In each round one rank alone, then both ways in turns;
quoted is the median of the rounds' ratios. Prints a table, writes docs/beside_diffusers.md and benchmarks/results/beside_diffusers.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch import Tensor, nn

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.tiny_models import MODELS, TinyModel
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_transformer

NAMES = [
    "wan",
    "wan, image context",
    "chronoedit",
    "qwen-image",
    "qwen-image, masked",
    "flux2",
    "ltx",
    "ltx2",
    "helios",
    "minimax-h3",
]
# (frames, height, width) in latent pixels.
SIZES = {"even": (4, 16, 16), "odd": (3, 18, 22)}
PAGE = Path(__file__).parents[1] / "docs/beside_diffusers.md"


def model_of(name: str) -> TinyModel:
    """With heads that two ranks share evenly."""
    model = MODELS[name]
    heads = {"num_attention_heads": 4}
    if name.startswith("ltx"):
        heads["cross_attention_dim"] = 32
    if name == "ltx2":
        heads |= {"audio_num_attention_heads": 4, "audio_cross_attention_dim": 16}
    if "added_kv_proj_dim" in model.config:
        heads["added_kv_proj_dim"] = 48
    return replace(model, config={**model.config, **heads})


def with_para_core(transformer: nn.Module, **_: bool) -> nn.Module:
    """The transformer on two ranks."""
    return parallelize_transformer(transformer, mesh=init_context_parallel_mesh("cpu"))


def with_diffusers(transformer: Any, *, uneven: bool) -> nn.Module:
    """The transformer on two ranks, by diffusers' own context parallelism."""
    # It asks how many accelerators there are; on a CPU that is none.
    torch.accelerator.device_count = dist.get_world_size
    transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, ulysses_anything=uneven))
    return transformer  # type: ignore[no-any-return]


WAYS: dict[str, Callable[..., nn.Module]] = {"para_core": with_para_core, "diffusers": with_diffusers}


def inputs_of(model: TinyModel, name: str, size: str) -> dict[str, Any]:
    """Of one call; nine text tokens, of which the last is left out for the even size."""
    inputs = model.inputs(*SIZES[size])
    if size == "even" and "image context" not in name and name != "minimax-h3":
        for key in ("encoder_hidden_states", "encoder_hidden_states_mask", "encoder_attention_mask", "txt_ids"):
            if isinstance(inputs.get(key), Tensor):
                inputs[key] = inputs[key][:, :8]
    return {**inputs, "return_dict": False}


def measure(name: str, size: str, rounds: int) -> dict[str, Any]:
    """Of each way its error or what it says, and its speed-up over one rank."""
    model = model_of(name)
    inputs = inputs_of(model, name, size)
    reference = model.build()
    expected = reference(**inputs)[0]
    found: dict[str, Any] = {}
    ways = {}
    for way, apply in WAYS.items():
        failed = torch.zeros(1)
        try:
            transformer = apply(model.build(), uneven=size == "odd")
            out = transformer(**inputs)[0]
            error = float((out - expected).norm() / expected.norm()) if out.shape == expected.shape else float("inf")
            found[way] = {"error": error}
            ways[way] = transformer
        except Exception as error:  # whatever it is: the table says it
            found[way] = {"refused": str(error).strip().split("\n")[0][:160]}
            failed += 1
        dist.all_reduce(failed)
        if failed:
            ways.pop(way, None)
    seconds: dict[str, list[float]] = {"1 rank": [], **{way: [] for way in ways}}
    for _ in range(rounds):
        dist.barrier()
        if dist.get_rank() == 0:
            seconds["1 rank"].append(timed(reference, inputs))
        for way, transformer in ways.items():
            dist.barrier()
            seconds[way].append(timed(transformer, inputs))
    dist.barrier()
    if dist.get_rank() == 0:
        for way in ways:
            ratios = [one / many for one, many in zip(seconds["1 rank"], seconds[way], strict=True)]
            found[way]["speed-up"] = statistics.median(ratios)
        found["milliseconds on 1 rank"] = 1000 * statistics.median(seconds["1 rank"])
    return found


def timed(transformer: nn.Module, inputs: dict[str, Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    transformer(**inputs)
    return time.perf_counter() - start


def verdict(found: dict[str, Any]) -> str:
    """A cell of the table."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    exact = f"{found['error']:.0e}" if found["error"] < 1e-4 else f"**wrong**, {found['error']:.1g}"
    return exact if "speed-up" not in found else f"{exact}, {found['speed-up']:.2f} ×"


def main() -> None:
    """Start the two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank_process:
        launch("benchmarks.beside_diffusers", 2, "--rank-process", "--rounds", str(options.rounds))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # where a way fails on one rank alone
    lines = [
        "# Beside diffusers' own context parallelism",
        "",
        (
            "Written by `python -m benchmarks.beside_diffusers`: tiny models with random weights, two ranks, Ulysses. The relative error "
            "against the unmodified model, and the speed-up over one rank (these models are small: what a way costs per call weighs "
            "more than what it saves)."
        ),
        "",
        "| model | tokens | para_core | diffusers |",
        "| --- | --- | --- | --- |",
    ]
    rows = []
    with torch.inference_mode():
        for name in NAMES:
            for size in SIZES:
                found = measure(name, size, options.rounds)
                rows.append({"model": name, "tokens": size, **found})
                lines.append(f"| {name} | {size} | {verdict(found['para_core'])} | {verdict(found['diffusers'])} |")
                if dist.get_rank() == 0:
                    print(lines[-1], flush=True)
    if dist.get_rank() == 0:
        PAGE.write_text("\n".join(lines) + "\n")
        print(write_results("beside_diffusers", {"rounds": options.rounds, "rows": rows}, "diffusers"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
