"""para_core next to diffusers' own context parallelism, on each model that both accept: exactness, and the time of a
step.

    python -m benchmarks.pipelines.beside_diffusers

Two ranks have one thread each. First each model of `zoo.tiny.transformers.registry` with four heads runs with even
numbers of tokens and text, which diffusers requires, and with odd ones (there with diffusers' `ulysses_anything`). The
table shows which of them accept a model, and the error. Where both are exact, a model of the same class with 2 layers
(of each kind) of 4 heads × 128 and a few thousand tokens is timed, so that a step takes about a second. In each round
one rank first runs the unmodified model alone, then every way runs in turn, and the first one comes later in the next
round. Figures are medians of the rounds and of their ratios. Writes benchmarks/results/beside_diffusers.json
(docs/measured/peers.md, README.md).
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch import Tensor, nn

from benchmarks.harness import (
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    true_on_all_ranks,
    write_results,
)
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_transformer
from zoo.tiny.transformers.registry import MODELS

NAMES = [
    "flux",
    "flux2",
    "wan",
    "wan, image context",
    "chronoedit",
    "qwen-image",
    "qwen-image, masked",
    "ltx",
    "ltx2",
    "helios",
    "minimax-h3",
]
# Each size has (frames, height, width) in tokens, and a number of text tokens.
TINY = {"even": (4, 8, 8), "odd": (3, 9, 11)}
LARGE = {"even": (4, 20, 32), "odd": (3, 21, 41)}
LARGE_TEXT = {"even": 256, "odd": 255}
# These change the configuration in addition to 4 heads × 128.
LARGE_CONFIG: dict[str, dict[str, Any]] = {
    "flux": {"axes_dims_rope": (16, 56, 56)},
    "flux2": {"axes_dims_rope": (32, 32, 32, 32)},
    "wan": {"ffn_dim": 2048, "rope_max_seq_len": 64},
    "wan, image context": {"ffn_dim": 2048, "rope_max_seq_len": 64, "added_kv_proj_dim": 512},
    "chronoedit": {"ffn_dim": 2048, "rope_max_seq_len": 64},
    "qwen-image": {"axes_dims_rope": (16, 56, 56)},
    "qwen-image, masked": {"axes_dims_rope": (16, 56, 56)},
    "minimax-h3": {"hidden_size": 512, "ffn_dim": 2048, "rope_freq_dim": 16},
}
ROUNDS = 7
Build = Callable[[], nn.Module]
# Results up to this relative error count as exact.
EXACT = 1e-5


def tiny(name: str, size: str) -> tuple[Build, dict[str, Any]]:
    """Return a builder of a model with heads that two ranks share, and inputs with 9 text tokens (even: 8)."""
    model = MODELS[name]
    heads = {"num_attention_heads": 4}
    if name.startswith("ltx"):
        heads["cross_attention_dim"] = 128
    if name == "ltx2":
        heads |= {"cross_attention_dim": 256, "audio_num_attention_heads": 4, "audio_cross_attention_dim": 128}
    if "added_kv_proj_dim" in model.config:
        heads["added_kv_proj_dim"] = 128
    inputs = model.inputs(*latent_pixels(name, TINY[size]))
    if size == "even" and "image context" not in name and name != "minimax-h3":
        for key in ("encoder_hidden_states", "encoder_hidden_states_mask", "encoder_attention_mask", "txt_ids"):
            if isinstance(inputs.get(key), Tensor):
                dim = inputs[key].ndim - 2 if key == "txt_ids" else 1
                inputs[key] = inputs[key].narrow(dim, 0, 8)
    return partial(model.build, **heads), {**inputs, "return_dict": False}


def large(name: str, size: str) -> tuple[Build, dict[str, Any]]:
    """Return a function that builds a model whose step takes about a second, and the inputs of one sample."""
    model = MODELS[name]
    config = {"num_attention_heads": 4, "attention_head_dim": 128, **LARGE_CONFIG[name]}
    # MiniMax-H3 has seven tokens of sound in the same sequence.
    text = LARGE_TEXT[size] + (name == "minimax-h3")
    # The last 512 tokens of a context with an image are text.
    make = model.inputs if "image context" in name else partial(model.inputs, text=text)
    inputs = make(*latent_pixels(name, LARGE[size]))
    # MiniMax-H3 has one sample with two time steps.
    if name != "minimax-h3":
        inputs = {key: first_sample(value) for key, value in inputs.items()}
    return partial(model.build, **config), {**inputs, "return_dict": False}


def latent_pixels(name: str, tokens: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (frames, height, width) in latent pixels."""
    frames, height, width = tokens
    patch = 2 if name.startswith(("wan", "chronoedit", "helios")) else 1
    return frames, height * patch, width * patch


def first_sample(value: Any) -> Any:
    """Return the first of two samples."""
    return value[:1] if isinstance(value, (Tensor, list)) and len(value) == 2 else value


def with_para_core(transformer: nn.Module, *, ring: int = 1, uneven: bool) -> nn.Module:
    """Return the transformer on two ranks."""
    return parallelize_transformer(transformer, mesh=init_context_parallel_mesh("cpu", max_ring_dim_size=ring))


def with_diffusers(transformer: Any, *, ring: int = 1, uneven: bool) -> nn.Module:
    """Return the transformer on two ranks, with diffusers' own context parallelism."""
    # diffusers reads the number of accelerators, which is 0 on a CPU.
    torch.accelerator.device_count = dist.get_world_size
    config = ContextParallelConfig(ring_degree=2, ring_anything=uneven)
    if ring == 1:
        config = ContextParallelConfig(ulysses_degree=2, ulysses_anything=uneven)
    transformer.enable_parallelism(config=config)
    return transformer  # type: ignore[no-any-return]


WAYS: dict[str, Callable[..., nn.Module]] = {
    "para_core": with_para_core,
    "para_core, ring": partial(with_para_core, ring=2),
    "diffusers": with_diffusers,
    "diffusers, ring": partial(with_diffusers, ring=2),
}


def applied(
    build: Build, inputs: dict[str, Any], expected: Tensor, ways: list[str], *, uneven: bool
) -> tuple[dict[str, nn.Module], dict[str, dict[str, Any]]]:
    """Return the transformer of each way, unless a rank failed, and its error or its message."""
    transformers, outcomes = {}, {}
    for way in ways:
        try:
            transformer = WAYS[way](build(), uneven=uneven)
            out = transformer(**inputs)[0]
            outcomes[way] = {"error": relative_error(out, expected)}
            transformers[way] = transformer
        except Exception as error:  # The table shows any error.
            outcomes[way] = {"refused": str(error).strip().split("\n")[0][:160]}
        if not true_on_all_ranks(way in transformers):
            transformers.pop(way, None)
    return transformers, outcomes


def is_exact(outcome: dict[str, Any]) -> bool:
    return bool(outcome.get("error", float("inf")) < EXACT)


def seconds_of(name: str, size: str, ways: list[str], rounds: int) -> dict[str, Any]:
    """Return the error of each way on the large model, and its seconds in each round, also for one rank alone."""
    build, inputs = large(name, size)
    alone = build()
    transformers, outcomes = applied(build, inputs, alone(**inputs)[0], ways, uneven=size == "odd")
    taken: dict[str, list[tuple[float, float]]] = {"1 rank": [], **{way: [] for way in transformers}}
    order = list(transformers)
    for _ in range(rounds):
        dist.barrier()
        if dist.get_rank() == 0:
            taken["1 rank"].append(timed(alone, inputs))
        for way in order:
            dist.barrier()
            taken[way].append(timed(transformers[way], inputs))
        order = [*order[1:], *order[:1]]
    dist.barrier()
    seconds, on_a_core = ({way: [both[kind] for both in rounds] for way, rounds in taken.items()} for kind in (0, 1))
    return {"found": outcomes, "seconds": seconds, "CPU seconds": on_a_core}


def timed(transformer: nn.Module, inputs: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of one call, and those that this process spent on a core."""
    start = time.perf_counter(), time.process_time()
    transformer(**inputs)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def ratios(seconds: dict[str, list[float]], way: str, beside: str) -> list[float]:
    """Return the rounds' seconds of ``way`` divided by those of ``beside``."""
    return [a / b for a, b in zip(seconds[way], seconds[beside], strict=True)]


def spread(values: list[float]) -> str:
    """Return the median, and the lowest and highest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})"


# These messages come from a limit that is not in diffusers' own code. The page explains each.
LIMITS = {
    "ProcessGroupGloo::allgather": "gloo",
    "Native attention does not support return_lse": "a CPU",
    "is not a submodule of": "our tiny config",
}


def verdict(outcome: dict[str, Any]) -> str:
    """Return a cell of the first table."""
    if "refused" not in outcome:
        return f"{outcome['error']:.0e}" if is_exact(outcome) else f"**wrong**, {outcome['error']:.1g}"
    limits = [limit for message, limit in LIMITS.items() if message in outcome["refused"]]
    return f"*stopped by {limits[0]}*" if limits else f"refused: {outcome['refused']}"


def outcome(tiny_rows: list[dict[str, Any]]) -> list[str]:
    """Return the number of exact, stopped and refused cells of each way in the first table."""
    lines = []
    for way in WAYS:
        words = [verdict(row[way]).split(":")[0].split(" by ")[0].strip("*") for row in tiny_rows]
        exact = sum(is_exact(row[way]) for row in tiny_rows)
        rest = ", ".join(f"{words.count(word)} {word}" for word in ("stopped", "refused") if words.count(word))
        lines.append(f"- {way}: {exact} of {len(tiny_rows)} exact" + (f"; {rest}" if rest else ""))
    return lines


def conclusion(rows: list[dict[str, Any]]) -> str:
    """Return the medians over the rows of the second table, as a sentence."""
    seconds, on_a_core = (
        spread([statistics.median(ratios(row[kind], "diffusers", "para_core")) for row in rows])
        for kind in ("seconds", "CPU seconds")
    )
    return (
        f"Over these {len(rows)} models the median ratio of seconds is {seconds}, of CPU seconds {on_a_core}: "
        "with Ulysses on two CPU ranks both take the same time, within what rounds differ by."
    )


def speed_row(row: dict[str, Any]) -> list[str]:
    """Return a row of the second table."""
    seconds = row["seconds"]
    cells = [row["model"], f"{statistics.median(seconds['1 rank']):.2f}"]
    for way in ("para_core", "diffusers", "para_core, ring"):
        cell = verdict(row["found"][way])
        if way in seconds:
            speed_up = statistics.median(ratios(seconds, "1 rank", way))
            cell = f"{statistics.median(seconds[way]):.2f} ({speed_up:.2f} ×)"
        cells.append(cell)
    return [*cells, spread(ratios(seconds, "diffusers", "para_core"))]


def flux_table(row: dict[str, Any]) -> list[str]:
    """Return the table of README.md: a row for each way in which FLUX was measured."""
    seconds, rows = row["seconds"], []
    for way, of_rounds in seconds.items():
        is_parallel = way != "1 rank"
        name = f"{way}, Ulysses" if is_parallel and "ring" not in way else way
        cells = [name, f"{statistics.median(of_rounds):.2f}"]
        cells += (
            [spread(ratios(seconds, "1 rank", way)), f"{row['found'][way]['error']:.1e}"] if is_parallel else ["", ""]
        )
        rows.append(cells)
    return markdown_table(["", "seconds per step", "speed-up over 1 rank", "relative difference"], rows)


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/peers.md on diffusers, and the table of README.md (``speed``)."""
    results = read_results("beside_diffusers")
    heads = ["model", "1 rank, s", "para_core, s", "diffusers, s", "para_core, ring, s"]
    rows = [speed_row(row) for row in results["large"]]
    return {
        "outcome": outcome(results["tiny"]),
        "seconds": markdown_table([*heads, "diffusers' seconds / para_core's"], rows),
        "conclusion": [conclusion(results["large"])],
        "speed": flux_table(next(row for row in results["large"] if row["model"] == "flux")),
    }


def measure(names: list[str], rounds: int) -> dict[str, Any]:
    """Return the rows of both tables."""
    warnings.simplefilter("ignore")
    tiny_rows, large_rows = [], []
    with torch.inference_mode():
        for name in names:
            for size in TINY:
                build, inputs = tiny(name, size)
                outcomes = applied(build, inputs, build()(**inputs)[0], list(WAYS), uneven=size == "odd")[1]
                tiny_rows.append({"model": name, "tokens": size, **outcomes})
        for row in tiny_rows:
            # A way may have failed on one rank only.
            ways = [way for way in WAYS if true_on_all_ranks(is_exact(row[way]))]
            if not {"para_core", "para_core, ring", "diffusers"} <= {*ways}:
                continue
            name, size = row["model"], row["tokens"]
            large_rows.append({"model": name, "tokens": size, **seconds_of(name, size, ways, rounds)})
    return {"rounds": rounds, "tiny": tiny_rows, "large": large_rows}


def main() -> None:
    """Measure on two ranks and write."""
    parser_of(__doc__).parse_args()
    # The time-out is short, because a way may fail on one rank only.
    results = measure_on_ranks(measure, 2, NAMES, ROUNDS, timeout=60.0)
    for row in results["large"]:
        print(speed_row(row))
    print(write_results("beside_diffusers", results, "diffusers"))


if __name__ == "__main__":
    main()
