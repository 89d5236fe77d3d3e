"""The cost of the bits of one process on two ranks, in seconds of CPU. Writes same_bits_cost.json:

    python -m benchmarks.pipelines.same_bits_cost                   # some minutes, 6 GB
    python -m benchmarks.pipelines.same_bits_cost --parts order
    python -m benchmarks.pipelines.same_bits_cost --parts tiny real

*order*: keys and values of a joint call in the order of the model, as they always are, next to the order in which they
arrive, rank by rank. *tiny* and *real*: a call of a transformer with ``same_bits=True`` next to one without, after the
first call, and what the first call with a size costs more. *real* has one double and one single block of FLUX's widths.

Both ways run in turns in the same two processes, which have one thread and share their weights. A figure is the sum of
the CPU seconds of both ranks, so that it hardly depends on what else the machine does; a wait costs nothing.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import (
    in_turns,
    largest_over_ranks,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    write_results,
)
from para_core.adapters import parallelize_transformer
from para_core.attention import ulysses
from para_core.attention.block_rows import BlockRows
from para_core.recorder.run_counter import RunCounter
from tests.tiny import flux_inputs, flux_transformer

RESULTS = "same_bits_cost"
MESHES = {"Ulysses 2": (1, 2), "ring 2": (2, 1)}
RANKS = 2
# New sizes, each of which has a first call.
_NEW_SIZES = 3


class Case(NamedTuple):
    """A transformer of FLUX, and the sizes of a call.

    Args:
        config: The config of the transformer, where it is not that of tests/tiny.py.
        image, text: The numbers of tokens of both ranks.
        rounds: How often each way runs.
    """

    config: dict[str, Any]
    image: int
    text: int
    dtype: str
    rounds: int


_WIDE = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "num_layers": 1, "num_single_layers": 1}
_REAL = {**_WIDE, "num_attention_heads": 24}
# A quarter of FLUX's width: a call of some thousand tokens takes about a second of CPU.
ORDER = {
    "one double and one single block, 6 heads × 128": Case(
        {**_WIDE, "num_attention_heads": 6}, 2048, 512, "float32", 16
    )
}
OPTION = {
    "tiny": {
        "tiny, 2 + 2 blocks": Case({"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}, 63, 13, "float32", 60),
    },
    "real": {
        "FLUX's widths, 1 + 1 blocks": Case(_REAL, 514, 14, "bfloat16", 8),
        "FLUX's widths, 1 + 1 blocks, long": Case(_REAL, 2048, 512, "bfloat16", 8),
    },
}
PARTS = ("order", *OPTION)


@contextmanager
def rank_by_rank() -> Iterator[None]:
    """Leave keys and values in the order in which they arrive inside this context, as queries are."""
    with mock.patch.object(ulysses, "BlockRows", partial(BlockRows, ordered=False)):
        yield


@torch.no_grad()
def measure_order(name: str) -> dict[str, Any]:
    """Return the seconds of a call in both orders, and the launches and the bytes that the order takes."""
    case = ORDER[name]
    models = _models(case)
    mesh = init_device_mesh("cpu", MESHES["Ulysses 2"], mesh_dim_names=("ring", "ulysses"))
    for model in models:
        # Replicated text has another exchange, which orders the tokens in any case.
        parallelize_transformer(model, mesh=mesh, text="shard")
    inputs = _inputs(case)
    with rank_by_rank():
        other = models[1](**inputs, return_dict=False)[0]
    difference = largest_over_ranks(relative_error(models[0](**inputs, return_dict=False)[0], other))
    if not difference < 1e-5:
        raise RuntimeError(f"the two orders differ by {difference}; expected rounding.")

    def in_order() -> None:
        models[0](**inputs, return_dict=False)

    def as_they_arrive() -> None:
        with rank_by_rank():
            models[1](**inputs, return_dict=False)

    ways = {"in order": in_order, "rank by rank": as_they_arrive}
    launches = {way: _launches(call) for way, call in ways.items()}
    calls = case.config["num_layers"] + case.config["num_single_layers"]
    heads = case.config["num_attention_heads"] // RANKS
    size = getattr(torch, case.dtype).itemsize
    return {
        **_compare(ways, case.rounds, base="rank by rank", way="in order"),
        "launches per attention call": (launches["in order"] - launches["rank by rank"]) / calls,
        # Keys and values of this rank's heads are read once and written once.
        "bytes per attention call": 2 * 2 * (case.image + case.text) * heads * case.config["attention_head_dim"] * size,
    }


@torch.no_grad()
def measure_option(part: str, name: str, mesh_name: str) -> dict[str, Any]:
    """Return the seconds of a call with and without the option, and those that a first call takes more."""
    case = OPTION[part][name]
    models = _models(case)
    mesh = init_device_mesh("cpu", MESHES[mesh_name], mesh_dim_names=("ring", "ulysses"))
    ways: dict[str, Callable[..., None]] = {}
    for way, model in zip(("off", "on"), models, strict=True):
        parallelize_transformer(model, mesh=mesh, same_bits=way == "on")
        ways[way] = partial(_call, model)
    first = {way: [_first_call(call, case, new) for new in range(1, _NEW_SIZES + 1)] for way, call in ways.items()}
    inputs = _inputs(case)
    turns = {way: partial(call, inputs) for way, call in ways.items()}
    return {
        **_compare(turns, case.rounds, base="off", way="on"),
        "launches": _launches(turns["on"]) - _launches(turns["off"]),
        "first call, more seconds": {way: round(statistics.median(seconds), 4) for way, seconds in first.items()},
    }


def _models(case: Case) -> list[FluxTransformer2DModel]:
    """Return two equal transformers, which share their weights."""
    model = flux_transformer(**case.config).to(getattr(torch, case.dtype))
    return [model, copy.deepcopy(model, {id(x): x for x in model.parameters()})]


def _inputs(case: Case, more: int = 0) -> dict[str, Any]:
    inputs = flux_inputs(case.image + more, case.text)
    return {name: x.to(getattr(torch, case.dtype)) for name, x in inputs.items()}


def _call(model: FluxTransformer2DModel, inputs: dict[str, Any]) -> None:
    model(**inputs, return_dict=False)


def _first_call(call: Callable[..., None], case: Case, more: int) -> float:
    """Return how many more CPU seconds the first call with a new size takes than the second, on both ranks."""
    inputs = _inputs(case, more)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        call(inputs)
        seconds.append(time.process_time() - start)
    return sum(_over_ranks([seconds[0] - seconds[1]]))


def _compare(ways: dict[str, Callable[[], Any]], rounds: int, *, base: str, way: str) -> dict[str, Any]:
    """Return the median seconds of each way, and median and quartiles of the ratios to ``base`` of the rounds."""
    seconds = {name: _over_ranks(values) for name, values in in_turns(ways, rounds, time.process_time).items()}
    ratios = [x / y for x, y in zip(seconds[way], seconds[base], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "CPU seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(lower, 4), round(upper, 4)],
        "rounds": rounds,
    }


def _over_ranks(seconds: list[float]) -> list[float]:
    """Return the sum over ranks of each number."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values)
    return values.tolist()  # type: ignore[no-any-return]


def _launches(call: Callable[[], Any]) -> int:
    with RunCounter() as counter:
        call()
    return counter.launches


def run(names: list[str]) -> None:
    """Measure the named parts, and write each figure as soon as it is there."""
    results = read_results(RESULTS)
    for name in ORDER if "order" in names else ():
        results.setdefault("order", {})[name] = measure_on_ranks(measure_order, RANKS, name)
        write_results(RESULTS, results, "diffusers")
    for part, cases in OPTION.items():
        for name in cases if part in names else ():
            for mesh_name in MESHES:
                row = measure_on_ranks(measure_option, RANKS, part, name, mesh_name)
                results.setdefault("option", {}).setdefault(name, {})[mesh_name] = row
                write_results(RESULTS, results, "diffusers")


def parts() -> dict[str, list[str]]:
    """Return the table of docs/same_bits.md."""
    results = read_results(RESULTS)
    rows = []
    for name, case in ORDER.items():
        for row in [results["order"][name]] if name in results.get("order", {}) else []:
            launches = f"{row['launches per attention call']:g} per attention call"
            rows.append(["keys in order", _size(name, case), "Ulysses 2", *_times(row, "rank by rank"), launches, ""])
    for cases in OPTION.values():
        for name, case in cases.items():
            for mesh_name, row in results.get("option", {}).get(name, {}).items():
                more = row["first call, more seconds"]
                first = f"{more['on']:.3g} s; {more['off']:.3g} s without"
                rows.append(["`same_bits`", _size(name, case), mesh_name, *_times(row, "off"), row["launches"], first])
    heads = ["", "sizes", "ranks", "CPU s without", "ratio", "quartiles", "launches more", "first call more"]
    return {"same bits, cost": markdown_table(heads, rows)}


def _size(name: str, case: Case) -> str:
    return f"{name}; {case.image} + {case.text} tokens, {case.dtype}"


def _times(row: dict[str, Any], base: str) -> list[str]:
    lower, upper = row["quartiles"]
    return [f"{row['CPU seconds'][base]:.3g}", f"{row['ratio']:.3f}", f"{lower:.3f} to {upper:.3f}"]


def main() -> None:
    """Measure the parts that the command line names, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    run(parser.parse_args().parts)
    for table in parts().values():
        print("\n".join(table))


if __name__ == "__main__":
    main()
