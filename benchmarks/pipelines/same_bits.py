"""Whether several ranks give the bits of one process: every tiny pipeline on every kind of mesh. Writes same_bits.json:

    python -m benchmarks.pipelines.same_bits                                # every cell that the JSON has not: hours
    python -m benchmarks.pipelines.same_bits --ways "Ulysses 2" --only flux --again
    python -m benchmarks.pipelines.same_bits --ways "VAE rows 2" "VAE rows 3" --only KL
    python -m benchmarks.pipelines.same_bits --ways "Ulysses 2" --only flux wan --threads 2

A cell is "equal", the relative error of the latents after three steps with an odd number of tokens, or the error that
every rank raised. The expected latents are those of the unmodified pipeline in the same process. Each process has one
thread, or as many as --threads says, under the key "threads" of the JSON. Each way of VAE rows decodes and encodes by
every tiny autoencoder instead, under the key "vaes".
--real-widths runs one double and one single block of FLUX's real widths (3072, 12288), with 257 image tokens per rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from benchmarks.harness import (
    largest_over_ranks,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    true_on_all_ranks,
    write_results,
)
from benchmarks.pipelines.latents import IN_BFLOAT16, PIPELINES, generate, in_bfloat16
from para_core.adapters import parallelize_pipe, parallelize_vae
from para_core.adapters.registry import transformers_of
from tests.tiny import flux_inputs, flux_pipe, flux_transformer
from zoo.tiny.vaes import TINY_VAES, random_image

RESULTS = "same_bits"
# Ranks import diffusers once for so many pipelines.
_BATCH = 12
# Tokens per rank of the image and of the text, for --real-widths.
_REAL_TOKENS, _REAL_TEXT = 257, 7


@dataclass(frozen=True)
class Way:
    """A way to run a pipeline on several ranks.

    Args:
        mesh: The ranks along each dim of the mesh.
        options: Further options of ``parallelize_pipe``.
        has_8_bit_weights: Whether the weights of the denoisers, also those of one process, are stored in 8 bits.
    """

    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    has_8_bit_weights: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())


_ON = {"same_bits": True}
# Without "off", the option same_bits is on.
WAYS = {
    "Ulysses 2, off": Way({"ring": 1, "ulysses": 2}),
    "Ulysses 2": Way({"ring": 1, "ulysses": 2}, _ON),
    "Ulysses 3": Way({"ring": 1, "ulysses": 3}, _ON),
    "Ulysses 4": Way({"ring": 1, "ulysses": 4}, _ON),
    "ring 2": Way({"ring": 2, "ulysses": 1}, _ON),
    "CFG 2, off": Way({"batch": 2, "ring": 1, "ulysses": 1}),
    "CFG 2": Way({"batch": 2, "ring": 1, "ulysses": 1}, _ON),
    "fsdp 2": Way({"ring": 1, "ulysses": 2}, {**_ON, "weights": "fsdp"}),
    "stages 2": Way({"pipe": 2}, _ON),
    "offload 2": Way({"ring": 1, "ulysses": 2}, {**_ON, "offload": "blocks"}),
    "8-bit weights 2": Way({"ring": 1, "ulysses": 2}, _ON, has_8_bit_weights=True),
}
# The number of ranks that hold rows of the image, and the options of ``parallelize_vae``.
VAE_WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "VAE rows 2, off": (2, {}),
    "VAE rows 2": (2, _ON),
    "VAE rows 3": (3, _ON),
}
DTYPES = ("float32", "bfloat16")


def has_bits(out: Tensor, expected: Tensor) -> bool:
    """Return whether both tensors have the same shape, type and bytes."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    return torch.equal(out.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def measure(names: list[str], ways: list[str], dtype: str, threads: int = 1) -> dict[str, dict[str, str]]:
    """Return for each pipeline and way "equal", or the relative error of the worst rank."""
    torch.set_num_threads(threads)
    meshes = {
        way: init_device_mesh("cpu", tuple(WAYS[way].mesh.values()), mesh_dim_names=tuple(WAYS[way].mesh))
        for way in ways
    }
    cells: dict[str, dict[str, str]] = {}
    for name in names:
        expected_of = {
            quantized: _generate_on_first_rank(name, dtype, quantized)
            for quantized in sorted({WAYS[way].has_8_bit_weights for way in ways})
        }
        cells[name] = {}
        for way in ways:
            expected = expected_of[WAYS[way].has_8_bit_weights]
            # Sharded weights cannot be restored, so each way gets its own.
            pipe = _build(name, dtype, WAYS[way].has_8_bit_weights)
            try:
                parallelize_pipe(pipe, mesh=meshes[way], **WAYS[way].options)
                out = generate(pipe, name, bfloat16=dtype == "bfloat16")
            except (RuntimeError, TypeError, ValueError) as error:
                # Every rank raises the same error.
                cells[name][way] = str(error)
                continue
            difference = largest_over_ranks(relative_error(out, expected))
            cells[name][way] = "equal" if true_on_all_ranks(has_bits(out, expected)) else f"{difference:.0e}"
        if dist.get_rank() == 0:
            print(dtype, name, cells[name], flush=True)
    return cells


def _generate_on_first_rank(name: str, dtype: str, has_8_bit_weights: bool) -> Tensor:
    """Return the latents of the unmodified pipeline, computed by one process. Collective."""
    expected: list[Any] = [None]
    if dist.get_rank() == 0:
        pipe = _build(name, dtype, has_8_bit_weights)
        expected[0] = generate(pipe, name, bfloat16=dtype == "bfloat16")
    dist.broadcast_object_list(expected)
    return expected[0]


def _build(name: str, dtype: str, has_8_bit_weights: bool) -> Any:
    pipe = PIPELINES[name].build()
    if dtype == "bfloat16":
        pipe = in_bfloat16(pipe)
    if has_8_bit_weights:
        for module in transformers_of(pipe).values():
            quantize_(module, Int8WeightOnlyConfig())
    return pipe


def run(ways: Iterable[str], dtypes: Iterable[str], only: Iterable[str] | None, *, again: bool) -> None:
    """Measure the cells that the JSON has not, and write them batch by batch."""
    for dtype in dtypes:
        known = PIPELINES if dtype == "float32" else IN_BFLOAT16
        names = [name for name in known if only is None or name in only]
        for ranks in sorted({WAYS[way].ranks for way in ways}):
            on_ranks = [way for way in ways if WAYS[way].ranks == ranks]
            rows = read_results(RESULTS).get(dtype, {})
            missing = [name for name in names if again or not rows.get(name, {}).keys() >= {*on_ranks}]
            for start in range(0, len(missing), _BATCH):
                cells = measure_on_ranks(measure, ranks, missing[start : start + _BATCH], on_ranks, dtype)
                results = read_results(RESULTS)
                rows = results.setdefault(dtype, {})
                for name, row in cells.items():
                    rows[name] = {**rows.get(name, {}), **row}
                results[dtype] = {name: rows[name] for name in known if name in rows}
                write_results(RESULTS, results, "diffusers")


def run_with_threads(threads: int, ways: Iterable[str], dtypes: Iterable[str], names: Iterable[str]) -> None:
    """Measure pipelines, and two blocks of FLUX with real widths, with several threads in each process."""
    for dtype in dtypes:
        known = PIPELINES if dtype == "float32" else IN_BFLOAT16
        for way in ways:
            chosen = [name for name in names if name in known]
            cells = measure_on_ranks(measure, WAYS[way].ranks, chosen, [way], dtype, threads)
            wide = measure_on_ranks(measure_real_widths, WAYS[way].ranks, way, dtype, threads)
            results = read_results(RESULTS)
            rows = results.setdefault("threads", {}).setdefault(str(threads), {}).setdefault(dtype, {})
            for name, row in {**cells, "real widths": {way: wide}}.items():
                rows[name] = {**rows.get(name, {}), **row}
            write_results(RESULTS, results, "diffusers")


@torch.no_grad()
def measure_real_widths(way: str, dtype: str, threads: int = 1) -> str:
    """Return "equal" or the relative error of one call of two blocks of FLUX with real widths."""
    torch.set_num_threads(threads)
    config = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    model = flux_transformer(num_layers=1, num_single_layers=1, **config).to(getattr(torch, dtype))
    ranks = dist.get_world_size()
    inputs = flux_inputs(_REAL_TOKENS * ranks, _REAL_TEXT * ranks)
    inputs = {name: x.to(getattr(torch, dtype)) for name, x in inputs.items()}
    expected = model(**inputs, return_dict=False)[0]
    mesh = init_device_mesh("cpu", tuple(WAYS[way].mesh.values()), mesh_dim_names=tuple(WAYS[way].mesh))
    parallelize_pipe(flux_pipe(transformer=model), mesh=mesh, **WAYS[way].options)
    out = model(**inputs, return_dict=False)[0]
    difference = largest_over_ranks(relative_error(out, expected))
    if true_on_all_ranks(has_bits(out, expected)):
        return "equal"
    return f"{difference:.0e}"


def run_real_widths(dtypes: Iterable[str]) -> None:
    """Measure the cells of real widths that the JSON has not."""
    for dtype in dtypes:
        for way in ("Ulysses 2, off", "Ulysses 2", "ring 2", "Ulysses 4"):
            results = read_results(RESULTS)
            row = results.setdefault("real widths", {}).setdefault(dtype, {})
            if way not in row:
                row[way] = measure_on_ranks(measure_real_widths, WAYS[way].ranks, way, dtype)
                print(dtype, way, row[way], flush=True)
                write_results(RESULTS, results, "diffusers")


@torch.no_grad()
def measure_vaes(names: list[str], ways: list[str], dtype: str) -> dict[str, dict[str, str]]:
    """Return for each autoencoder and way "equal" if both directions are, or what they are, separated by a comma."""
    cells: dict[str, dict[str, str]] = {}
    for name in names:
        cells[name] = {}
        for way in ways:
            found = [_measure_direction(name, direction, VAE_WAYS[way][1], dtype) for direction in ("decode", "encode")]
            cells[name][way] = found[0]
            if found[0] != found[1]:
                cells[name][way] = f"decode {found[0]}, encode {found[1]}"
        if dist.get_rank() == 0:
            print(dtype, name, cells[name], flush=True)
    return cells


def _measure_direction(name: str, direction: str, options: dict[str, Any], dtype: str) -> str:
    """Return "equal", the relative error of the worst rank, or the error that every rank raised."""
    tiny = TINY_VAES[name]
    vae = tiny.make().to(getattr(torch, dtype))
    shape = tiny.latents
    if direction == "encode":
        shape = tiny.pixels
    image = random_image(shape).to(getattr(torch, dtype))
    try:
        torch.manual_seed(0)
        expected = getattr(tiny, direction)(vae, image)
        parallelize_vae(vae, **options)
        torch.manual_seed(0)
        out = getattr(tiny, direction)(vae, image)
    except (RuntimeError, ValueError) as error:
        # Every rank raises the same error, and some raise it in one process, too.
        return str(error)
    difference = largest_over_ranks(relative_error(out, expected))
    if true_on_all_ranks(has_bits(out, expected)):
        return "equal"
    return f"{difference:.0e}"


def run_vaes(ways: Iterable[str], dtypes: Iterable[str], only: Iterable[str] | None, *, again: bool) -> None:
    """Measure the cells of autoencoders that the JSON has not, and write them batch by batch."""
    names = [name for name in TINY_VAES if only is None or name in only]
    for dtype in dtypes:
        for way in ways:
            rows = read_results(RESULTS).get("vaes", {}).get(dtype, {})
            missing = [name for name in names if again or way not in rows.get(name, {})]
            for start in range(0, len(missing), _BATCH):
                batch = missing[start : start + _BATCH]
                cells = measure_on_ranks(measure_vaes, VAE_WAYS[way][0], batch, [way], dtype)
                results = read_results(RESULTS)
                rows = results.setdefault("vaes", {}).setdefault(dtype, {})
                for name, row in cells.items():
                    rows[name] = {**rows.get(name, {}), **row}
                write_results(RESULTS, results, "diffusers")


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/same_bits.md: how many pipelines have the bits of one process, by measured way."""
    results = read_results(RESULTS)
    return {
        "same bits": _counts_of_equal(results, WAYS),
        "same bits, real widths": _table_of_real_widths(results),
        "same bits, vaes": _counts_of_equal(results.get("vaes", {}), VAE_WAYS),
    }


def _counts_of_equal(of_dtypes: dict[str, Any], ways: Iterable[str]) -> list[str]:
    """Return a table that says for each measured way and type how many rows of the JSON are "equal", of how many."""
    table = []
    for way in ways:
        row = [way]
        for dtype in DTYPES:
            cells = [cells[way] for cells in of_dtypes.get(dtype, {}).values() if way in cells]
            row.append(f"{cells.count('equal')} of {len(cells)}" if cells else "not measured")
        if {*row[1:]} != {"not measured"}:
            table.append(row)
    return markdown_table(["ranks", *DTYPES], table)


def _table_of_real_widths(results: dict[str, Any]) -> list[str]:
    of_dtypes = results.get("real widths", {})
    ways = [way for way in WAYS if any(way in of_dtypes.get(dtype, {}) for dtype in DTYPES)]
    table = [[way, *[of_dtypes.get(dtype, {}).get(way, "not measured") for dtype in DTYPES]] for way in ways]
    return markdown_table(["ranks", *DTYPES], table)


def main() -> None:
    """Run the named ways."""
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *VAE_WAYS], default=[*WAYS, *VAE_WAYS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these pipelines and VAEs only")
    parser.add_argument("--again", action="store_true", help="measure cells that the JSON has, too")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process, for WAYS and NAMES")
    parser.add_argument("--real-widths", action="store_true", help="blocks of FLUX's widths; minutes, 8 GB")
    options = parser.parse_args()
    if options.real_widths:
        run_real_widths(options.dtypes)
        return
    ways = [way for way in options.ways if way in WAYS]
    if options.threads != 1:
        run_with_threads(options.threads, ways, options.dtypes, options.only or list(PIPELINES))
        return
    vae_ways = [way for way in options.ways if way in VAE_WAYS]
    run(ways, options.dtypes, options.only, again=options.again)
    run_vaes(vae_ways, options.dtypes, options.only, again=options.again)
    for table in parts().values():
        print("\n".join(table))


if __name__ == "__main__":
    main()
