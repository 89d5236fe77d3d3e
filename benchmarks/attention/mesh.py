"""Host cost of attention over a mesh, compared with Ulysses and ring attention written by hand.

    python -m benchmarks.attention.mesh

Sizes are so small that computing takes no time. What remains is the time of Python and the dispatcher before a device
has work.

- one call, on a fake group of 8 (one process, nobody is waited for) and on two gloo ranks: by hand, eager with and
  without the agreement between ranks, and compiled.
- FLUX of 57 small blocks on a fake group of 8, against the unmodified model given as many tokens as a rank has.

All ways of a part run in turns in one process, and ratios are those of the same round. Writes
benchmarks/results/host_cost.json. Parts that are not measured stay as they are.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.harness import (
    calls_in_python,
    fake_group,
    in_turns,
    measure_on_ranks,
    parser_of,
    read_results,
    write_results,
)
from benchmarks.pipelines.beside_diffusers import first_sample
from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.adapters import parallelize_transformer
from para_core.distributed.agreed_inputs import assume_agreed
from para_core.plans.region import region_of
from zoo.tiny.transformers.registry import MODELS

# -- Ulysses and ring attention written by hand, for even sizes: no mask, no gradient, no check. Tensors are [B, H,
# S_local, D] of a model that has them as [B, S_local, H, D] in memory.


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send an equal part of the first dim of ``x`` to each rank."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def ulysses_by_hand(query: Tensor, key: Tensor, value: Tensor, *, group: ProcessGroup) -> Tensor:
    """Attend over all tokens of a part of the heads, with one all-to-all before and one after."""
    ranks = group.size()
    batch, heads, tokens, width = query.shape
    # The shape is [rank, S_local, B, 3, H_local, D]. The received parts are in the order of the tokens, and are used
    # without a copy.
    parts = [x.view(batch, ranks, heads // ranks, tokens, width).permute(1, 3, 0, 2, 4) for x in (query, key, value)]
    entered = all_to_all(torch.stack(parts, dim=3), group)
    block = entered.view(ranks * tokens, batch, 3, heads // ranks, width).permute(2, 1, 3, 0, 4)
    out = F.scaled_dot_product_attention(*block.unbind(0))
    left = all_to_all(out.permute(2, 0, 1, 3).contiguous(), group)
    left = left.view(ranks, tokens, batch, heads // ranks, width).permute(2, 1, 0, 3, 4)
    return left.reshape(batch, tokens, heads, width).contiguous().transpose(1, 2)


def shift(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Begin to send ``x`` to the next rank. Return a function that waits for the tensor of the previous rank."""
    ranks, rank = group.size(), group.rank()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % ranks, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks, group),
    ]
    works = dist.batch_isend_irecv(operations)

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return received

    return finish


def ring_by_hand(query: Tensor, key: Tensor, value: Tensor, *, group: ProcessGroup) -> Tensor:
    """Pass keys and values around the ring while a block is computed, and merge in float32. CPU only."""
    held = torch.stack([key, value])
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(group.size()):
        arriving = shift(held, group) if step + 1 < group.size() else None
        block, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, held[0], held[1])
        block, block_lse = block.float(), block_lse[..., None]
        if step == 0:
            out, lse = block, block_lse
        else:
            out = out - torch.sigmoid(block_lse - lse) * (out - block)
            lse = torch.logaddexp(lse, block_lse)
        if arriving is not None:
            held = arriving()
    return out.to(query.dtype)


# -- Measuring.

Way = Callable[[], Any]
PARTS = ("fake", "gloo", "flux")
# This number of attention calls is timed together, and is in a graph: as many as a step of FLUX has.
CHAIN, ROUNDS = 57, 40


def measure(
    ways: Mapping[str, Way],
    rounds: int,
    clock: Callable[[], float],
    *,
    calls: int,
    base: Callable[[str], str],
    before: Way = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Return the microseconds per call of each way, and its ratio to the way that ``base`` names. On a loaded machine
    use the lowest.

    Args:
        calls: the number of calls in one run of a way.
    """
    seconds = in_turns(ways, rounds, clock, before)
    table = {}
    for name, of_way in seconds.items():
        of_base = seconds[base(name)]
        ratios = [a / b for a, b in zip(of_way, of_base, strict=True)]
        lower, _, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        table[name] = {
            "median us": round(1e6 * statistics.median(of_way) / calls, 1),
            "lowest us": round(1e6 * min(of_way) / calls, 1),
            "against": base(name),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(lower, 3), round(upper, 3)],
            "ratio of the lowest": round(min(of_way) / min(of_base), 3),
            "python calls": round(calls_in_python(ways[name]) / calls),
        }
    return table


# -- One call.


def attention_ways(ranks: int, *, agreement: bool) -> dict[str, Way]:
    """Return a chain of attention calls in each way. With ``agreement``, also return ways with the exchange before each
    call.
    """
    group = dist.group.WORLD
    assert group is not None
    query, key, value = (torch.randn(1, 8, 8, 16).transpose(1, 2) for _ in range(3))

    def chain(attend: Attend) -> Tensor:
        out = query
        for _ in range(CHAIN):
            out = attend(out, key, value)
        return out

    def under(mode: UnifiedAttnMode) -> Tensor:
        with mode:
            return chain(F.scaled_dot_product_attention)

    ways: dict[str, Way] = {"SDPA of one rank": partial(chain, F.scaled_dot_product_attention)}
    for name, function, size in (("ulysses", ulysses_by_hand, 1), ("ring", ring_by_hand, ranks)):
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=size)
        ways[f"{name}, by hand"] = partial(chain, partial(function, group=group))
        mode = UnifiedAttnMode(mesh, assume_equal=True)
        ways[f"{name}, eager"] = partial(under, mode)
        if agreement:
            ways[f"{name}, eager, with the agreement"] = partial(under, UnifiedAttnMode(mesh))
        ways[f"{name}, compiled"] = torch.compile(partial(under, mode), fullgraph=True, backend="aot_eager")
    return ways


def by_hand_of(name: str) -> str:
    """Return the way with which ``name`` is compared."""
    return f"{name.split(',', maxsplit=1)[0]}, by hand" if "," in name else name


def measure_fake(rounds: int, ranks: int = 8) -> dict[str, Any]:
    """Measure one call on a fake group, in CPU seconds of this process, which other processes hardly change."""
    with fake_group(ranks), torch.no_grad():
        ways = attention_ways(ranks, agreement=False)
        return measure(ways, rounds, time.process_time, calls=CHAIN, base=by_hand_of)


def measure_ranks(rounds: int) -> dict[str, Any]:
    """Measure one call on real ranks, until its result is complete."""
    with torch.no_grad():
        ways = attention_ways(dist.get_world_size(), agreement=True)
        rows = measure(ways, rounds, time.perf_counter, calls=CHAIN, base=by_hand_of, before=dist.barrier)
    dist.barrier()
    return rows


# -- FLUX.


def flux_inputs(text: int, image: int) -> dict[str, Any]:
    """Return the inputs of one step of one sample."""
    inputs = MODELS["flux"].inputs(1, 1, image, text=text)
    return {**{name: first_sample(value) for name, value in inputs.items()}, "return_dict": False}


def flux_ways(model: FluxTransformer2DModel, text: int, image: int, ranks: int) -> dict[str, Way]:
    """Return a step of the model in each way. ``text`` and ``image`` are the tokens of a rank."""
    local, whole = flux_inputs(text, image), flux_inputs(ranks * text, ranks * image)
    group = dist.group.WORLD
    assert group is not None

    def twin() -> FluxTransformer2DModel:
        """Return another instance with the same weights."""
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})

    def by_hand_at_each_call(attend: Attend) -> Way:
        """Replace the function by which diffusers calls attention, so that nothing is intercepted."""
        module = twin()

        def dispatch(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

        def step() -> None:
            with mock.patch("diffusers.models.transformers.transformer_flux.dispatch_attention_fn", dispatch):
                module(**local)

        return step

    def parallel(ring: int) -> Way:
        module = parallelize_transformer(twin(), mesh=init_context_parallel_mesh("cpu", max_ring_dim_size=ring))

        def step() -> None:
            with assume_agreed([region_of(module)]):  # A pipeline has compared its arguments before.
                module(**whole)

        return step

    first, second = twin(), twin()
    return {
        "unmodified": lambda: first(**local),
        "unmodified, again": lambda: second(**local),
        "ulysses, by hand": by_hand_at_each_call(partial(ulysses_by_hand, group=group)),
        "ring, by hand": by_hand_at_each_call(partial(ring_by_hand, group=group)),
        "ulysses": parallel(1),
        "ring": parallel(ranks),
    }


def measure_flux(
    rounds: int, *, width: int, text: int, image: int, ranks: int = 8, blocks: tuple[int, int] = (19, 38)
) -> dict[str, Any]:
    """Measure a step on a fake group, in CPU seconds of this process."""
    with fake_group(ranks), torch.no_grad():
        model: Any = MODELS["flux"].build(
            num_layers=blocks[0],
            num_single_layers=blocks[1],
            num_attention_heads=8,
            attention_head_dim=width,
            axes_dims_rope=(width // 4, width // 4, width // 2),
        )
        ways = flux_ways(model, text, image, ranks)
        return measure(ways, rounds, time.process_time, calls=1, base=lambda _: "unmodified")


# -- All parts.


def show(part: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{part}")
    for name, row in table.items():
        low, high = row["quartiles"]
        print(
            f"  {name:<44}{row['median us']:>10.0f} us, lowest {row['lowest us']:>8.0f}   × {row['ratio']:.2f} "
            f"({low:.2f} - {high:.2f}; of the lowest {row['ratio of the lowest']:.2f}), {row['python calls']} Python "
            "calls",
            flush=True,
        )


def main() -> None:
    """Measure every part, print and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "fake": ("one call on a fake group of 8", partial(measure_fake, ROUNDS)),
        "gloo": ("one call on 2 gloo ranks", partial(measure_on_ranks, measure_ranks, 2, ROUNDS)),
        "flux": (
            "FLUX of 57 blocks, 8 heads of 8, 16 tokens per rank, on a fake group of 8",
            partial(measure_flux, ROUNDS, width=8, text=4, image=12),
        ),
    }
    for part in options.parts:
        title, run = parts[part]
        table = run()
        show(title, table)
        print(write_results("host_cost", {**read_results("host_cost"), title: table}, "diffusers"))


if __name__ == "__main__":
    main()
