"""Choose a mesh, and where weights wait that do not fit on the device. Tests: tests/planner/test_predict.py."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from para_core.adapters.planner.mesh import MeshShape, all_shapes
from para_core.adapters.planner.predict import Machine, Prediction, can_move_blocks, memory_of, predict
from para_core.adapters.planner.weights import Placement, default_text_encoders
from para_core.adapters.planner.work import Workload
from para_core.distributed.mesh_shape import mesh_sizes, parse_mesh_sizes
from para_core.option_values import QUANTIZE, Offload

# The ways to hold the weights of the transformer, as the option ``weights`` of parallelize_pipe.
WeightsOption = Literal["replicate", "fsdp", "tensor"]
# Meshes whose predicted seconds differ by at most this factor count as equally fast. The median error of the
# seconds is larger ("errors" in benchmarks/results/planner_check.json).
EQUALLY_FAST = 1.1


@dataclass(frozen=True)
class Choices:
    """The user's choices besides the number of ranks. The planner chooses what is left at its default.

    The arguments are as in ``plan_mesh``, which documents them.

    Raises:
        ValueError: An argument has an unknown value, or two exclude each other.
    """

    weights: WeightsOption | None = None
    offload: bool | Offload = True
    quantize: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_value("weights", self.weights, (None, *get_args(WeightsOption)))
        _check_value("quantize", self.quantize, (None, *QUANTIZE))
        _check_value("offload", self.offload, (True, False, *get_args(Offload)))
        if self.offload in get_args(Offload) and self.weights in ("fsdp", "tensor"):
            raise ValueError(
                f"weights is {self.weights!r} with offload {self.offload!r}; expected 'replicate'."
            )
        # Called for its errors: it checks the names and sizes.
        parse_mesh_sizes(",".join(f"{name}={size}" for name, size in self.mesh.items()))


def _check_value(name: str, value: Any, values: Collection[Any]) -> None:
    if value not in values:
        # The command line has no None, True or False: there the option is left out.
        names = [repr(each) for each in values if isinstance(each, str)]
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(names)}.")


def rank_meshes(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[Prediction]:
    """Return the predictions for all allowed meshes of ``ranks`` ranks: the chosen one, then by seconds.

    After the meshes that fit come those that do not, by memory, and meshes that cannot run come last. If no
    mesh runs with exact weights, and the user has named no scheme, int8 weights are tried.

    Raises:
        ValueError: The choices allow no mesh of this number of ranks.
    """
    rows = _predict_all(work, machine, ranks, choices)
    if not any(row.runs for row in rows) and choices.quantize is None and work.weights.in_8_bits < 1:
        # Meshes that cannot run at all are listed once.
        quantized = _predict_all(work, machine, ranks, replace(choices, quantize="int8"))
        rows += [row for row in quantized if not row.problem]
    rows.sort(key=lambda row: (bool(row.problem), max(0.0, row.memory - row.room), row.seconds))
    best = rows[0]
    if best.runs:
        slowest = EQUALLY_FAST * best.seconds
        best = min((row for row in rows if row.runs and row.seconds <= slowest), key=_preference)
    return [best, *[replace(row, why=_reason(row, best)) for row in rows if row is not best]]


def _preference(row: Prediction) -> tuple[bool, int, bool, int, int, float]:
    """Return the sort key of equally fast meshes: weights that stay, then CFG branches on own ranks, then Ulysses."""
    shape, moves = row.shape, row.placement.resident is not None or row.shape.fsdp
    is_grid = shape.ring_method != "rotate"
    return moves, -shape.batch, is_grid, shape.pipe, shape.tensor * shape.ring, row.seconds


def _reason(row: Prediction, best: Prediction) -> str:
    """Return why ``best`` is chosen and not ``row``; empty if ``row`` cannot run, which its problem says."""
    if row.problem:
        return ""
    if not row.fits:
        return f"{row.memory / 1e9:.0f} GB do not fit into {row.room / 1e9:.0f}"
    ratio = row.seconds / max(best.seconds, 1e-9)
    if ratio <= EQUALLY_FAST:
        return "about as fast"
    return f"{ratio:.1f} × the time"


def _predict_all(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[Prediction]:
    """Return the predictions for each allowed mesh, each with the first placement of its weights that fits.

    If the user has chosen neither, a mesh that needs blocks in host memory is predicted with FSDP2 as well.
    """
    rows: list[Prediction] = []
    for shape in _allowed_shapes(ranks, min(ranks, machine.per_host), choices):
        row = _predict_first_fit(shape, work, machine, choices)
        rows.append(row)
        is_open = choices.weights is None and choices.offload not in get_args(Offload)
        moves = row.placement.resident is not None or not row.fits
        if is_open and moves and not row.problem and shape.sequence > 1 and shape.tensor == shape.pipe == 1:
            rows.append(_predict_first_fit(replace(shape, fsdp=True), work, machine, choices))
    return rows


def _predict_first_fit(shape: MeshShape, work: Workload, machine: Machine, choices: Choices) -> Prediction:
    """Return the prediction of a mesh with the first placement of its weights that fits; the last if none fits."""
    for placement in _placements(shape, work, machine, choices):
        row = predict(shape, work, machine, placement)
        if row.fits or row.problem:
            break
    return row


def _placements(shape: MeshShape, work: Workload, machine: Machine, choices: Choices) -> Iterator[Placement]:
    """Yield the usual placement, then with text encoders, with the VAE and with blocks in host memory, too."""
    placement = Placement(default_text_encoders(shape), quantize=choices.quantize)
    if choices.offload == "model":
        yield replace(placement, takes_turns=True)
        return
    if choices.offload == "blocks":
        placement = replace(placement, encoders="offload")
    placements = [placement]
    waiting: Literal["first", "offload"] = "offload"
    if shape.ranks > 1:
        waiting = "first"
    if work.weights.encoders.total and not placement.encoders_wait:
        placements.append(replace(placements[-1], encoders=waiting))
    if work.weights.vae:
        placements.append(replace(placements[-1], vae=waiting))
    for placement in placements:
        if choices.offload == "blocks":
            yield _with_most_resident(placement, shape, work, machine.rank_room)
        else:
            yield placement
    if choices.offload is True and can_move_blocks(shape, work):
        yield _with_most_resident(placements[-1], shape, work, machine.rank_room)


def _with_most_resident(placement: Placement, shape: MeshShape, work: Workload, room: float) -> Placement:
    """Return ``placement`` with as many transformer blocks on the device as fit, and at least one in host memory."""
    for resident in range(len(work.weights.blocks) - 1, 0, -1):
        placed = replace(placement, resident=resident)
        if memory_of(shape, work, placed) <= room:
            return placed
    return replace(placement, resident=0)


def _allowed_shapes(ranks: int, ranks_per_host: int, choices: Choices) -> list[MeshShape]:
    """Return the shapes of ``ranks`` ranks that ``choices`` allow. Raise ValueError if there are none."""
    allowed = list(all_shapes(ranks))
    weights = choices.weights
    if weights is not None and "pipe" not in choices.mesh:
        allowed = [shape for shape in allowed if shape.pipe == 1]
    if ranks > 1:
        if choices.mesh:
            sizes = {"tensor": 1, "pipe": 1, **mesh_sizes(ranks, choices.mesh, ranks_per_host=ranks_per_host)}
            allowed = [shape for shape in allowed if shape.sizes == sizes]
        if weights is not None:
            allowed = [shape for shape in allowed if (shape.tensor > 1) == (weights == "tensor")]
        if weights == "fsdp":
            sharded = [shape for shape in allowed if shape.sequence > 1 and shape.pipe == 1]
            allowed = [replace(shape, fsdp=True) for shape in sharded]
    if not allowed:
        limits = ", ".join(f"{name}={size}" for name, size in choices.mesh.items())
        raise ValueError(
            f"mesh is {limits!r} and weights {weights!r}: no mesh of {ranks} ranks has both. Leave one of them out."
        )
    return allowed
