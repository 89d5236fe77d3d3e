"""The choice of a mesh: which are allowed, where the weights wait that do not fit, and which is best."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from para_core.adapters.planner.mesh import MeshShape, all_shapes
from para_core.adapters.planner.predict import Machine, memory_of, predict, problem_of
from para_core.adapters.planner.prediction import Prediction, default_text_encoders
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import Workload
from para_core.distributed.mesh_shape import mesh_sizes, parse_mesh_sizes
from para_core.option_values import QUANTIZE

# The ways to hold the weights of the transformer, as the option ``weights`` of parallelize_pipe.
WeightsOption = Literal["replicate", "fsdp", "tensor"]
Offload = Literal["blocks", "model"]
# Meshes whose predicted seconds differ by at most this factor count as equally fast. The median error of
# predicted seconds is larger ("errors" in benchmarks/results/planner_check.json), so a finer comparison would
# say nothing.
EQUALLY_FAST = 1.1


@dataclass(frozen=True)
class Choices:
    """The user's choices besides the sizes of a mesh. The planner chooses what the user leaves at its
    default.

    The arguments are as in ``plan_mesh``, which documents them.

    Raises:
        ValueError: An argument has an unknown value, or two exclude each other.
    """

    weights: WeightsOption | None = None
    offload: bool | Offload = True
    quantize: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weights is not None:
            _check_value("weights", self.weights, get_args(WeightsOption))
        if self.quantize is not None:
            _check_value("quantize", self.quantize, QUANTIZE)
        if not isinstance(self.offload, bool):
            _check_value("offload", self.offload, get_args(Offload))
        if self.offload in get_args(Offload) and self.weights in ("fsdp", "tensor"):
            raise ValueError(
                f"weights is {self.weights!r} with offload {self.offload!r}; expected 'replicate'."
            )
        # Called for its errors: it checks the names and sizes.
        parse_mesh_sizes(",".join(f"{name}={size}" for name, size in self.mesh.items()))


def _check_value(name: str, value: Any, values: Collection[str]) -> None:
    if value not in values:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, values))}.")


def rank_meshes(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[Prediction]:
    """Return the predictions for all allowed meshes of ``ranks`` ranks, the chosen one first, then by
    seconds.

    Meshes that fit come before those that do not, and meshes that cannot run come last. If no mesh runs with
    exact weights, and the user has named no scheme, int8 weights are tried.

    Raises:
        ValueError: The choices allow no mesh of this number of ranks.
    """
    rows = _predict_all(work, machine, ranks, choices)
    if not any(row.runs for row in rows) and choices.quantize is None and work.weights.in_8_bits < 1:
        # Meshes that cannot run at all are listed once.
        quantized = _predict_all(work, machine, ranks, replace(choices, quantize="int8"))
        rows += [row for row in quantized if not row.problem]
    rows.sort(key=lambda row: (bool(row.problem), not row.fits, row.seconds))
    equal = [
        row for row in rows if row.runs == rows[0].runs and row.seconds <= EQUALLY_FAST * rows[0].seconds
    ]
    if rows[0].runs:
        best = min(equal, key=_preference)
    else:
        best = rows[0]
    return [best, *[replace(row, why=_reason(row, best)) for row in rows if row is not best]]


def _preference(row: Prediction) -> tuple[bool, int, bool, int, int, float]:
    """Return the sort key of equally fast meshes: weights that stay, then CFG branches on own ranks, then Ulysses."""
    shape, moves = row.shape, row.placement.resident is not None or row.shape.fsdp
    return (
        moves,
        -shape.batch,
        shape.ring_method != "rotate",
        shape.pipe,
        shape.tensor * shape.ring,
        row.seconds,
    )


def _reason(row: Prediction, best: Prediction) -> str:
    """Return why ``best`` is chosen and not ``row``; empty if ``row`` cannot run, which has its own reason."""
    if row.problem:
        return ""
    if not row.fits:
        return f"{row.memory / 1e9:.0f} GB do not fit into {row.room / 1e9:.0f}"
    ratio = row.seconds / max(best.seconds, 1e-9)
    if ratio <= EQUALLY_FAST:
        return "about as fast"
    return f"{ratio:.1f} × the time"


def _predict_all(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[Prediction]:
    """Return the predictions for each allowed mesh.

    A mesh that does not fit is predicted again, with weights that FSDP2 shards and with blocks in host
    memory, if ``choices`` allow that.
    """
    rows: list[Prediction] = []
    for shape in _allowed_shapes(ranks, choices):
        if choices.weights == "fsdp" and ranks > 1:
            rows.append(_predict_first_fit(replace(shape, fsdp=True), work, machine, choices))
            continue
        row = _predict_first_fit(shape, work, machine, choices)
        rows.append(row)
        if row.fits or row.problem:
            continue
        if choices.weights is None and shape.sequence > 1 and shape.tensor == shape.pipe == 1:
            rows.append(_predict_first_fit(replace(shape, fsdp=True), work, machine, choices))
        if choices.offload is True and _can_move_blocks(shape, work):
            rows.append(
                predict(shape, work, machine, _with_most_resident(row.placement, shape, work, row.room))
            )
    return rows


def _predict_first_fit(shape: MeshShape, work: Workload, machine: Machine, choices: Choices) -> Prediction:
    """Return the prediction of a mesh with the first placement of its weights that fits; the last if none fits."""
    room = machine.rank_room
    for usual in _placements(shape, work, choices):
        placement = usual
        if choices.offload == "blocks" and _can_move_blocks(shape, work):
            placement = _with_most_resident(usual, shape, work, room)
        if memory_of(shape, work, placement) <= room or problem_of(shape, work, placement.quantize):
            break
    row = predict(shape, work, machine, placement)
    if choices.offload == "blocks" and not row.problem and not _can_move_blocks(shape, work):
        return replace(row, problem="its blocks cannot wait in host memory")
    return row


def _placements(shape: MeshShape, work: Workload, choices: Choices) -> Iterator[Placement]:
    """Yield the usual placement, then with text encoders in host memory, then with the VAE there, too."""
    if choices.offload == "model":
        yield Placement(takes_turns=True, quantize=choices.quantize)
        return
    placement = Placement(default_text_encoders(shape), quantize=choices.quantize)
    if choices.offload == "blocks":
        placement = replace(placement, encoders="offload")
    yield placement
    waiting: Literal["first", "offload"] = "offload"
    if shape.ranks > 1:
        waiting = "first"
    if work.weights.encoders.total and not placement.encoders_wait:
        placement = replace(placement, encoders=waiting)
        yield placement
    if work.weights.vae:
        yield replace(placement, vae=waiting)


def _can_move_blocks(shape: MeshShape, work: Workload) -> bool:
    """Whether transformer blocks can wait in host memory: only whole blocks can be moved between host and device."""
    return shape.tensor == shape.pipe == 1 and not shape.fsdp and len(work.weights.blocks) > 1


def _with_most_resident(placement: Placement, shape: MeshShape, work: Workload, room: float) -> Placement:
    """Return ``placement`` with as many transformer blocks on the device as fit, and at least one in host memory."""
    for resident in range(len(work.weights.blocks) - 1, 0, -1):
        placed = replace(placement, resident=resident)
        if memory_of(shape, work, placed) <= room:
            return placed
    return replace(placement, resident=0)


def _allowed_shapes(ranks: int, choices: Choices) -> list[MeshShape]:
    """Return the shapes of meshes of ``ranks`` ranks that ``choices`` allow.
    Raise ValueError if there are none.
    """
    allowed = list(all_shapes(ranks))
    if choices.mesh and ranks > 1:
        sizes = {"tensor": 1, "pipe": 1, **mesh_sizes(ranks, choices.mesh)}
        allowed = [shape for shape in allowed if shape.sizes == {name: sizes[name] for name in shape.sizes}]
    if choices.weights is not None and ranks > 1:
        allowed = [shape for shape in allowed if (shape.tensor > 1) == (choices.weights == "tensor")]
    if choices.weights == "fsdp" and ranks > 1:
        allowed = [shape for shape in allowed if shape.sequence > 1 and shape.pipe == 1]
    if choices.weights is not None and "pipe" not in choices.mesh:
        allowed = [shape for shape in allowed if shape.pipe == 1]
    if not allowed:
        demanded = ""
        if choices.weights is not None:
            demanded = f" and weights {choices.weights!r}"
        limits = ", ".join(f"{name}={size}" for name, size in choices.mesh.items())
        raise ValueError(
            f"mesh is {limits!r}{demanded}: no mesh of {ranks} ranks has both. Use other sizes, or leave one out."
        )
    return allowed
