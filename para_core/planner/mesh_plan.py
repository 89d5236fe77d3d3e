"""Meshes for one workload, the fastest first: seconds, bytes and memory of each, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from para_core.attention.grid import choose_grid
from para_core.planner.cost import (
    Machine,
    RingMethod,
    Seconds,
    Shape,
    call_seconds,
    of_tensor_rank,
    product_seconds,
    region_share,
)
from para_core.planner.traffic import AttentionCall, ModelCall, Part, Product, sent_in_rounds
from para_core.planner.weights import (
    Weights,
    patched,
    sent_between_stages,
    staged,
    stale_key_bytes,
    with_gathered_weights,
)
from para_core.weights.pipefusion import PipeFusion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of a device's memory, what CUDA, NCCL and fragments take.
RESERVED = 6e9
# Rows of a printed table.
_SHOWN = 14
# How ranks may share weights; replicated they always may be.
Sharing = Literal["tensor", "stages", "fsdp"]
SHARING: tuple[Sharing, ...] = get_args(Sharing)


@dataclass(frozen=True)
class Workload:
    """One generation.

    Args:
        calls: of the transformer, by the number of shares of its samples.
        branches: calls of a step, one after the other on one rank.
        steps: of the schedule.
        frames: of the result; an image has one.
        encoder: of the prompts; operations. ``decoder``: of the latents; operations.
        heads: of keys.
    """

    name: str
    calls: Mapping[int, ModelCall]
    branches: int
    steps: int
    weights: Weights
    encoder: float
    decoder: float
    heads: int
    frames: int = 1


@dataclass(frozen=True)
class Row:
    """A mesh, and what is predicted of it.

    Args:
        step: of one step, all branches; of PipeFusion: one on patches.
        encoder, decoder: seconds; on every rank the same.
        seconds: of one generation.
        sent: bytes that the first rank sends in a step.
        memory: bytes of the rank.
        problem: why it cannot run; None: it can.
        why: what it loses by, beside the first row.
    """

    shape: Shape
    step: Seconds
    encoder: float
    decoder: float
    seconds: float
    sent: int
    memory: float
    problem: str | None = None
    why: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What ``parallelize_pipe`` is given beside the mesh."""
        shape, found = self.shape, dict[str, Any]()
        if shape.ring_method != "rotate":
            found["rotate_method"] = "2d" if shape.ring_method == "2d" else "allgather"
        if shape.tensor > 1 or shape.fsdp:
            found["weights"] = "fsdp" if shape.fsdp else "tensor"
        if shape.pipefusion is not None:
            found["pipefusion"] = shape.pipefusion
        return found

    @property
    def mesh_options(self) -> dict[str, int]:
        """What ``init_context_parallel_mesh`` is given."""
        shape = self.shape
        sizes = {
            "max_pipe_dim_size": shape.pipe if shape.pipe > 1 else None,
            "max_batch_dim_size": shape.batch if shape.batch > 1 else None,
            "max_ring_dim_size": shape.ring,
            "max_ulysses_dim_size": shape.ulysses,
            "max_tensor_dim_size": shape.tensor if shape.tensor > 1 else None,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def call(self) -> str:
        """The line that runs a pipeline ``pipe`` so, on all ranks."""
        if self.shape.ranks == 1 and not self.options:
            return "pipe = pipe  # one device: as it is"
        mesh = "" if self.shape.ranks == 1 else f"mesh=init_context_parallel_mesh({_arguments(self.mesh_options)})"
        return f"parallelize_pipe({', '.join(['pipe', *filter(None, [mesh, _arguments(self.options)])])})"


def _arguments(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def shapes(ranks: int, *, sharing: Sequence[Sharing] = (), pipefusion: PipeFusion | None = None) -> Iterator[Shape]:
    """Every way to share ``ranks`` ranks out over the mesh dims; ``batch`` is 1 or 2. Without those of ``"fsdp"``.

    Args:
        sharing: also meshes whose ranks share weights so.
        pipefusion: also meshes whose stages work on patches so.
    """
    for batch in (1, 2):
        if ranks % batch:
            continue
        for stages in divisors(ranks // batch) if "stages" in sharing else [1]:
            # Weights in stages are refused beside those that tensor ranks share.
            for size in divisors(ranks // batch) if "tensor" in sharing and stages == 1 else [1]:
                left = ranks // (batch * stages * size)
                for ring in divisors(left):
                    for method in _ring_methods(ring):
                        yield Shape(batch, stages, ring, left // ring, size, method)
        if pipefusion is not None and ranks > batch:
            # A patch is the part of one rank.
            yield Shape(batch, ranks // batch, pipefusion=pipefusion)


def _ring_methods(ring: int) -> tuple[RingMethod, ...]:
    """In two dims only where there are rows and columns: with one column it is a ring that gathers."""
    return ("rotate", "2d") if choose_grid(ring, 1, 1)[1] > 1 else ("rotate",)


def divisors(number: int) -> list[int]:
    """From 1 on.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def problem_of(shape: Shape, work: Workload) -> str | None:
    """Why a mesh does nothing with its ranks; None: it does."""
    if shape.batch > 1 and work.branches == 1 and len(work.calls[2].parts) == 1:
        return "there is one branch of guidance: nothing for batch to share"
    if shape.tensor > 1 and work.weights.tensor == 0:
        return "nothing is known of tensor parallelism for this model"
    if shape.pipe > 1 and work.weights.no_stages is not None:
        return f"it does not run in stages: {work.weights.no_stages}"
    if shape.pipe > len(work.weights.blocks) and shape.pipe > 1:
        return f"{len(work.weights.blocks)} blocks are too few for {shape.pipe} stages"
    if shape.pipefusion is not None and work.weights.no_patches is not None:
        return f"it does not run on patches: {work.weights.no_patches}"
    if work.heads % shape.tensor:
        return f"tensor {shape.tensor} does not divide {work.heads} heads"
    if shape.ulysses * shape.tensor > work.heads:
        return (
            f"ulysses {shape.ulysses} × tensor {shape.tensor} is more than {work.heads} heads: a rank would have none"
        )
    return None


def predict(shape: Shape, work: Workload, machine: Machine) -> Row:
    """Seconds, bytes and memory of one mesh."""
    call = work.calls[shape.batch if len(work.calls[shape.batch].parts) > 1 else 1]
    own = call.parts[0]
    passes = work.branches if len(call.parts) > 1 else -(-work.branches // shape.batch)
    step = whole = _step(own, passes, shape, work, machine)
    if shape.pipefusion is not None:
        step = patched(own, passes, shape, machine)
    if shape.batch > 1:
        link = machine.topology.link(shape.sequence * shape.tensor, shape.batch)
        exchanged = Seconds(communication=link.seconds(own.returned * (shape.batch - 1)))
        step, whole = step + exchanged, whole + exchanged
    fusion = shape.pipefusion
    computed_whole = sum(fusion.is_whole(index, work.steps) for index in range(work.steps)) if fusion else 0
    device = machine.device
    encoder = work.encoder / (device.products * device.of_products) * machine.slowdown
    decoder = work.decoder / (device.products * device.of_convolutions) * machine.slowdown
    denoising = step.total * (work.steps - computed_whole) + whole.total * computed_whole
    return Row(
        shape,
        step,
        encoder,
        decoder,
        denoising + encoder + decoder,
        _sent(call, shape, work, machine, passes),
        memory_of(shape, work, own, passes),
        problem_of(shape, work),
    )


def _step(own: Part, passes: int, shape: Shape, work: Workload, machine: Machine) -> Seconds:
    """Exact, of the calls that one rank makes."""
    if shape.pipe > 1:
        return staged(own, passes, shape, machine)
    step = call_seconds(own, shape, machine).times(passes)
    return with_gathered_weights(step, work.weights, passes, shape, machine) if shape.fsdp else step


def _sent(call: ModelCall, shape: Shape, work: Workload, machine: Machine, passes: int) -> int:
    """Bytes that the first rank sends in a step: for attention and outputs, and for what is summed over tensor ranks."""
    parts = [
        replace(
            own,
            events=[of_tensor_rank(x, shape.tensor) if isinstance(x, AttentionCall) else x for x in own.events],
        )
        for own in call.parts
    ]
    rounds = [[replace(call, parts=parts)] * work.branches] * 2
    sequence, apart = (shape.batch, shape.ring, shape.ulysses), work.branches > 1
    # In the first step all ranks may compute what is new to them; here is every later one.
    two_dims = shape.ring_method == "2d"
    both, first = (sent_in_rounds(some, sequence, 0, apart=apart, two_dims=two_dims) for some in (rounds * 2, rounds))
    summed = sum(product_seconds(x, shape, machine)[1] for x in call.parts[0].events if isinstance(x, Product))
    gathered = passes * work.weights.transformer.gathered(shape.sequence) if shape.fsdp else 0.0
    # Of attention, a stage has its blocks' share.
    own = (both - first) // 2 // shape.pipe
    return own + round(passes * summed + gathered) + sent_between_stages(call.parts[0], passes, shape)


def memory_of(shape: Shape, work: Workload, own: Part, passes: int) -> float:
    """Bytes of a rank: its weights, the most that activations hold, and the keys that PipeFusion keeps."""
    share = region_share(own, shape.sequence) / shape.tensor
    kept = stale_key_bytes(own, passes, shape.pipe) if shape.pipefusion is not None else 0.0
    return work.weights.held(shape) + own.peak[0] * share + own.peak[1] + kept


@dataclass(frozen=True)
class MeshPlan:
    """Meshes of ``ranks`` ranks, the fastest first; what does not fit stands behind, and then what cannot run, with its reason.

    ``parallelize_pipe(pipe, mesh=plan.init_mesh(), **plan.best.options)`` runs the first one.

    Args:
        fewer: the fastest meshes of fewer ranks that fit, by their number.
    """

    work: Workload
    machine: Machine
    ranks: int
    rows: tuple[Row, ...]
    fewer: Mapping[int, Row]

    @property
    def best(self) -> Row:
        return self.rows[0]

    @property
    def fastest(self) -> Row:
        """Of all numbers of ranks up to ``ranks``."""
        return min([self.best, *self.fewer.values()], key=lambda row: row.seconds)

    @property
    def advice(self) -> str:
        """Whether so many ranks are worth it, in one sentence."""
        fastest, best = self.fastest, self.best
        if not _runs(best, self.machine):
            least = min(self.rows, key=lambda row: (row.problem is not None, row.memory))
            held = f"{least.memory / 1e9:.0f} GB of {room_of(self.machine) / 1e9:.0f} on each ({least.shape})"
            return f"{_ranks(self.ranks)} cannot run it: {least.problem or f'at least it needs {held}'}."
        if fastest.shape.ranks < self.ranks:
            return (
                f"{self.ranks} ranks take {best.seconds:.3g} s, {_count(fastest.shape.ranks)} {fastest.seconds:.3g} s: use "
                f"{fastest.shape.ranks}, and the others for other prompts ({_weight_of(best, fastest)})."
            )
        if self.ranks == 1:
            return f"One rank takes {best.seconds:.3g} s."
        if 1 not in self.fewer:
            return f"{self.ranks} ranks take {best.seconds:.3g} s; one does not hold it."
        one = self.fewer[1].seconds
        return f"{self.ranks} ranks take {best.seconds:.3g} s, one takes {one:.3g} s: {one / best.seconds:.2f} times as fast."

    def __str__(self) -> str:
        device, topology = self.machine.device, self.machine.topology
        connected = topology.inside.name
        if self.ranks > topology.per_host:
            connected += f" within {topology.per_host} ranks of a host, {topology.between.name} between hosts"
        head = f"{self.work.name}, {self.work.steps} steps, on {self.ranks} × {device.name} ({connected})"
        left = len(self.rows) - _SHOWN
        more = ["", f"{left} more rows: plan.rows."] if left > 0 else []
        best = ["", f"The first row: {self.best.call}"] if _runs(self.best, self.machine) else []
        return "\n".join([head, "", *table(self.rows[:_SHOWN]), *more, *best, "", self.advice])

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The mesh of the first row, over all ranks of this process group; see :func:`para_core.init_context_parallel_mesh`."""
        from para_core.make_mesh import init_context_parallel_mesh

        return init_context_parallel_mesh(device_type, **self.best.mesh_options)

    def plot(self, path: str | Path, *, rows: int = 8) -> None:
        """Plot milliseconds per step of the first ``rows`` meshes that can run, by what takes them. Needs matplotlib."""
        from matplotlib.figure import Figure

        shown = [row for row in self.rows if row.problem is None][:rows][::-1]
        figure = Figure(figsize=(9, 1.5 + 0.35 * len(shown)), layout="constrained")
        panel = figure.subplots()
        names, left = [str(row.shape) for row in shown], [0.0] * len(shown)
        for part in ("products", "attention", "other", "communication", "host"):
            widths = [1e3 * getattr(row.step, part) for row in shown]
            panel.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set(
            xlabel="ms per step", ylabel="batch × pipe × ring × ulysses × tensor", title=str(self).splitlines()[0]
        )
        panel.legend()
        figure.savefig(path)


def room_of(machine: Machine) -> float:
    """Bytes of a device that a rank may hold."""
    return machine.device.memory - RESERVED


def _runs(row: Row, machine: Machine) -> bool:
    return row.problem is None and row.memory <= room_of(machine)


def _ranks(number: int) -> str:
    return "One rank" if number == 1 else f"{number} ranks"


def _count(ranks: int) -> str:
    return "one takes" if ranks == 1 else f"{ranks} take"


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    heads = [
        "batch × pipe × ring × ulysses × tensor",
        "s",
        "s per step",
        "compute",
        "exposed",
        "host",
        "text",
        "VAE",
        "GB sent per step",
        "GB held",
        "why not",
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    for row in rows:
        step = row.step
        seconds = [row.seconds, step.total, step.compute, step.communication, step.host, row.encoder, row.decoder]
        cells = [str(row.shape), *[f"{x:.3g}" for x in seconds], f"{row.sent / 1e9:.2f}", f"{row.memory / 1e9:.0f}"]
        lines.append("| " + " | ".join([*cells, row.problem or row.why]) + " |")
    return lines


def _weight_of(row: Row, best: Row) -> str:
    """By which part of a step ``row`` loses most."""
    parts: list[tuple[float, str]] = [
        (getattr(row.step, name) - getattr(best.step, name), text)
        for name, text in (
            ("communication", "waits for what travels"),
            ("host", "waits for the host"),
            ("products", "computes products longer"),
            ("attention", "attends longer"),
            ("other", "copies and merges more"),
        )
    ]
    most, text = max(parts)
    return f"{text}: {1e3 * most:+.3g} ms per step"


def make_plan(
    work: Workload,
    machine: Machine,
    ranks: int,
    *,
    sharing: Sequence[Sharing] = SHARING,
    pipefusion: PipeFusion | None = None,
) -> MeshPlan:
    """All meshes of ``ranks`` ranks, those that fit in order of their seconds.

    Args:
        sharing: how ranks may share weights. ``"fsdp"``: where they do not fit otherwise.
        pipefusion: also meshes whose stages work on patches so, which approximates; None: exact ones alone.

    Raises:
        TypeError, ValueError: ``ranks`` is no positive integer, ``sharing`` or ``pipefusion`` is something else.
    """
    require_ranks(ranks)
    if isinstance(sharing, str) or not set(sharing) <= set(SHARING):
        raise ValueError(f"weights is {sharing!r}; expected some of {SHARING}, or () to replicate them.")
    if pipefusion is not None and not isinstance(pipefusion, PipeFusion):
        raise TypeError(
            f"pipefusion is {pipefusion!r}; expected a PipeFusion of para_core, or None for exact meshes alone."
        )
    found = _rows(work, machine, ranks, sharing, pipefusion)
    smaller = {size: _rows(work, machine, size, sharing, pipefusion)[0] for size in _smaller(ranks)}
    fewer = {size: row for size, row in smaller.items() if _runs(row, machine)}
    return MeshPlan(work, machine, ranks, tuple(found), fewer)


def require_ranks(ranks: Any) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; expected a positive integer: how many devices there are.")


def _smaller(ranks: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size < ranks]


def _rows(
    work: Workload, machine: Machine, ranks: int, sharing: Sequence[Sharing], pipefusion: PipeFusion | None
) -> list[Row]:
    """Those that can run first, of these those that fit into memory, then by seconds; with what each loses by."""
    room = room_of(machine)
    rows = [predict(shape, work, machine) for shape in shapes(ranks, sharing=sharing, pipefusion=pipefusion)]
    if "fsdp" in sharing:
        rows += [
            predict(replace(row.shape, fsdp=True), work, machine)
            for row in rows
            if row.memory > room and row.shape.sequence > 1 and row.shape.tensor == row.shape.pipe == 1
        ]
    # A tie is decided by what needs fewer kinds of groups.
    order = sorted(
        rows,
        key=lambda row: (
            row.problem is not None,
            row.memory > room,
            round(row.seconds, 9),
            row.shape.ring,
            row.shape.tensor,
        ),
    )
    best = order[0]
    return [best, *[replace(row, why=_why(row, best, room)) for row in order[1:]]]


def _why(row: Row, best: Row, room: float) -> str:
    if row.memory > room:
        return f"{row.memory / 1e9:.0f} GB do not fit into {room / 1e9:.0f}"
    if row.shape.pipe > 1 and row.shape.pipefusion is None:
        longer = 1e3 * (row.step.total - best.step.total)
        return f"its stages compute one after the other: {longer:+.3g} ms per step"
    return _weight_of(row, best)


def as_dict(row: Row) -> dict[str, Any]:
    """For a JSON."""
    step = {name: getattr(row.step, name) for name in ("products", "attention", "other", "communication", "host")}
    return {
        "mesh": str(row.shape),
        "seconds": row.seconds,
        "seconds per step": {"total": row.step.total, **step},
        "text encoder": row.encoder,
        "autoencoder": row.decoder,
        "bytes sent per step": row.sent,
        "bytes held": row.memory,
        "problem": row.problem,
        "why": row.why,
        "call": row.call,
    }
