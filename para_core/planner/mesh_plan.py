"""Meshes for one workload, the fastest first: seconds, bytes and memory of each, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of a device's memory, what CUDA, NCCL and fragments take.
_RESERVED = 6e9


@dataclass(frozen=True)
class Workload:
    """One generation.

    Args:
        calls: of the transformer, by the number of shares of its samples.
        branches: calls of a step, one after the other on one rank.
        steps: of the schedule.
        weights: bytes of the transformers; ``shared_weights``: those of them that tensor ranks share.
        other_weights: bytes of text encoders and autoencoder.
        encoder: of the prompts; operations. ``decoder``: of the latents; operations.
        heads: of keys.
        pipe_blocks: of the block stacks, which stages of a pipe would share.
    """

    name: str
    calls: Mapping[int, ModelCall]
    branches: int
    steps: int
    weights: float
    shared_weights: float
    other_weights: float
    encoder: float
    decoder: float
    heads: int
    pipe_blocks: int = 0


@dataclass(frozen=True)
class Row:
    """A mesh, and what is predicted of it.

    Args:
        step: of one step, all branches.
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


def shapes(ranks: int, *, tensor: bool = True, pipe: bool = False, two_dims: bool = False) -> Iterator[Shape]:
    """Every way to share ``ranks`` ranks out over the mesh dims; ``batch`` is 1 or 2.

    Args:
        tensor, pipe, two_dims: also meshes with these.
    """
    for batch in (1, 2):
        for stages in divisors(ranks // batch) if pipe else [1]:
            for size in divisors(ranks // (batch * stages)) if tensor else [1]:
                left = ranks // (batch * stages * size)
                for ring in divisors(left) if batch * stages * size * left == ranks else ():
                    methods: tuple[RingMethod, ...] = ("rotate", "2d") if two_dims and ring > 3 else ("rotate",)
                    for method in methods:
                        yield Shape(batch, stages, ring, left // ring, size, method)


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
    if shape.tensor > 1 and work.shared_weights == 0:
        return "nothing is known of tensor parallelism for this model"
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
    passes = work.branches
    one = call_seconds(own, shape, machine)
    exchanged = 0.0
    if shape.batch > 1:
        link = machine.topology.link(shape.ranks // shape.batch, shape.batch)
        exchanged = link.seconds(own.returned * (shape.batch - 1))
        passes = work.branches if len(call.parts) > 1 else -(-work.branches // shape.batch)
    step = one.times(passes) + Seconds(communication=exchanged)
    if shape.pipe > 1:
        step = _piped(step, own, passes, shape, machine)
    device = machine.device
    encoder = work.encoder / (device.products * device.of_products) * machine.slowdown
    decoder = work.decoder / (device.products * device.of_convolutions) * machine.slowdown
    seconds = step.total * work.steps + encoder + decoder
    return Row(
        shape,
        step,
        encoder,
        decoder,
        seconds,
        _sent(call, shape, work, machine, passes),
        memory_of(shape, work, own),
        problem_of(shape, work),
    )


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
    both, first = (sent_in_rounds(some, sequence, 0, apart=apart) for some in (rounds * 2, rounds))
    summed = sum(product_seconds(x, shape, machine)[1] for x in call.parts[0].events if isinstance(x, Product))
    return (both - first) // 2 + round(passes * summed)


def memory_of(shape: Shape, work: Workload, own: Part) -> float:
    """Bytes of a rank: all weights, of which tensor ranks and stages have a share each, and the most that activations hold."""
    weights = (work.weights - work.shared_weights + work.shared_weights / shape.tensor) / shape.pipe
    share = region_share(own, shape.sequence) / shape.tensor
    return weights + work.other_weights + own.peak[0] * share + own.peak[1]


def _piped(step: Seconds, own: Part, passes: int, shape: Shape, machine: Machine) -> Seconds:
    """PipeFusion, arXiv:2405.14430: as many patches as stages, each stage busy with one; a patch's tokens leave while the next is computed.

    A stage sends O(S · width) bytes in a step however many there are, and waits for the latency of its patches.
    """
    widest = max(
        (x for x in own.events if isinstance(x, AttentionCall)),
        key=lambda x: sum(y.total for y in x.queries),
        default=None,
    )
    if widest is None:
        return step
    tokens = sum(x.total for x in widest.queries) / shape.sequence
    sent = passes * tokens * widest.samples * widest.heads * widest.head_dim * widest.element_size
    link = machine.topology.link(shape.sequence * shape.tensor, shape.pipe)
    share = step.times(1 / shape.pipe)
    travelling = link.seconds(sent, messages=passes * shape.pipe)
    return replace(share, communication=share.communication + max(0.0, travelling - share.compute), host=step.host)


@dataclass(frozen=True)
class MeshPlan:
    """Meshes of ``ranks`` ranks, the fastest first; what cannot run stands behind, with its reason.

    Args:
        fewer: the fastest meshes of fewer ranks, by their number.
        planned: rows with mesh dims that para_core does not build yet; for comparison, never chosen.
    """

    work: Workload
    machine: Machine
    ranks: int
    rows: tuple[Row, ...]
    fewer: Mapping[int, Row]
    planned: tuple[Row, ...] = field(default=())

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
        one = self.fewer.get(1, best)
        if fastest.shape.ranks < self.ranks:
            return (
                f"{self.ranks} ranks take {best.seconds:.3g} s, {_count(fastest.shape.ranks)} {fastest.seconds:.3g} s: use "
                f"{fastest.shape.ranks}, and the others for other prompts ({_weight_of(best, fastest)})."
            )
        return f"{self.ranks} ranks take {best.seconds:.3g} s, one takes {one.seconds:.3g} s: {one.seconds / best.seconds:.2f} times as fast."

    def __str__(self) -> str:
        device, topology = self.machine.device, self.machine.topology
        connected = topology.inside.name
        if self.ranks > topology.per_host:
            connected += f" within {topology.per_host} ranks of a host, {topology.between.name} between hosts"
        head = f"{self.work.name}, {self.work.steps} steps, on {self.ranks} × {device.name} ({connected})"
        return "\n".join([head, "", *table(self.rows), "", self.advice])

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The mesh of the first row, over all ranks of this process group; see :func:`para_core.init_context_parallel_mesh`."""
        from para_core.make_mesh import init_context_parallel_mesh

        shape = self.best.shape
        return init_context_parallel_mesh(
            device_type,
            max_batch_dim_size=shape.batch,
            max_ring_dim_size=shape.ring,
            max_ulysses_dim_size=shape.ulysses,
            max_tensor_dim_size=shape.tensor if shape.tensor > 1 else None,
        )

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


def make_plan(work: Workload, machine: Machine, ranks: int, *, tensor: bool = True, planned: bool = False) -> MeshPlan:
    """All meshes of ``ranks`` ranks, those that fit in order of their seconds.

    Args:
        tensor: also meshes with a ``tensor`` dim, which needs ``weights="tensor"``.
        planned: also predict Attention2D and PipeFusion, in :attr:`MeshPlan.planned`.

    Raises:
        ValueError: ``ranks`` is no positive integer.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; expected a positive integer: how many devices there are.")
    found = _ordered([predict(shape, work, machine) for shape in shapes(ranks, tensor=tensor)], machine)
    fewer = {
        size: _ordered([predict(shape, work, machine) for shape in shapes(size, tensor=tensor)], machine)[0]
        for size in _smaller(ranks)
    }
    beside: list[Row] = []
    if planned:
        known = {row.shape for row in found}
        every = shapes(ranks, tensor=tensor, pipe=True, two_dims=True)
        beside = _ordered([predict(shape, work, machine) for shape in every if shape not in known], machine)
    return MeshPlan(work, machine, ranks, tuple(found), fewer, tuple(beside))


def _smaller(ranks: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size < ranks]


def _ordered(rows: Sequence[Row], machine: Machine) -> list[Row]:
    """Those that can run first, of these those that fit into memory, then by seconds; with what each loses by."""
    room = machine.device.memory - _RESERVED
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
    }
