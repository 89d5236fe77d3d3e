"""Whether the collectives of all ranks would end on NCCL: the same order and sizes, and nobody waiting in a circle.

Each communicator has a stream on each rank. A collective starts behind all that the compute stream had waited for when
it was launched, and ends once all its ranks have started it. A host that waits is held until its device has nothing
left to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from tests.simulated_gpu.record import Event, HostWaits, Launch, Waited

Communicator = tuple[str, tuple[int, ...]]
Spot = tuple[int, int]  # A rank, and the index of an event in its log.


def problems(logs: Sequence[Sequence[Event]], *, busy_hosts: bool = False) -> list[str]:
    """Return what is wrong with the logs of all ranks, a sentence each. With ``busy_hosts`` a host may also wait for
    its device at any launch, as it does to load a kernel or to allocate memory.
    """
    partners: dict[Spot, list[Spot]] = {}
    found = []
    for communicator, spots in _by_communicator(logs).items():
        counts = {rank: len(spots[rank]) for rank in communicator[1]}
        if len(set(counts.values())) > 1:
            found.append(f"{communicator}: ranks launch different numbers of collectives: {counts}")
        for step in range(min(counts.values())):
            together = [(rank, spots[rank][step]) for rank in communicator[1]]
            partners |= dict.fromkeys(together, together)
            launches = [launch for rank, index in together if isinstance(launch := logs[rank][index], Launch)]
            difference = _difference(launches)
            if difference:
                lines = sorted({launch.line for launch in launches})
                found.append(f"{communicator}, collective {step}: {difference} @ {'; '.join(lines)}")
    try:
        TopologicalSorter(_waits(logs, partners, busy_hosts)).prepare()
    except CycleError as error:
        found.append(f"hang: {', which waits for '.join(_described(logs, *node) for node in reversed(error.args[1]))}")
    return found


def _by_communicator(logs: Sequence[Sequence[Event]]) -> dict[Communicator, dict[int, list[int]]]:
    """Return the indices of launches by communicator and rank. Pairs that send have a communicator of their own."""
    found: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in enumerate(logs):
        for index, event in enumerate(log):
            if isinstance(event, Launch):
                found[_communicator(rank, event)][rank].append(index)
    return found


def _communicator(rank: int, launch: Launch) -> Communicator:
    if launch.peer is None:
        return launch.group, launch.ranks
    return launch.group, tuple(sorted((rank, launch.ranks[launch.peer])))


def _difference(launches: list[Launch]) -> str:
    """Return how the launches of one collective differ between the ranks, or an empty string."""
    kinds = {launch.kind for launch in launches}
    if kinds & {"send", "recv"}:
        if kinds != {"send", "recv"}:
            return f"{kinds.pop()} on both ranks of a pair"
        sizes = {(launch.dtype, launch.sizes) for launch in launches}
        return f"sent and received differ: {sorted(sizes)}" if len(sizes) > 1 else ""
    if len(kinds) > 1:
        return f"different collectives: {sorted(kinds)}"
    if len({launch.dtype for launch in launches}) > 1:
        return f"different dtypes: {sorted({launch.dtype for launch in launches})}"
    if kinds == {"all_to_all"}:
        for i, sender in enumerate(launches):
            for j, receiver in enumerate(launches):
                if sender.sizes[j] != receiver.received[i]:
                    return f"rank {i} sends {sender.sizes[j]} elements to rank {j}, which takes {receiver.received[i]}"
    elif len({launch.sizes for launch in launches}) > 1:
        return f"different sizes: {[launch.sizes for launch in launches]}"
    return ""


Node = tuple[str, int, int]  # A host that reaches an event, a compute stream, or a collective that ends.


def _waits(logs: Sequence[Sequence[Event]], partners: dict[Spot, list[Spot]], busy: bool) -> dict[Node, set[Node]]:
    """Return for each host, stream and collective what it waits for."""
    waits: dict[Node, set[Node]] = defaultdict(set)
    for rank, log in enumerate(logs):
        # What holds the host and the compute stream, and the collectives since the host has waited.
        held: set[Node] = set()
        stream: set[Node] = set()
        pending: set[Node] = set()
        last: dict[Communicator, Node] = {}
        for index, event in enumerate(log):
            here = ("host", rank, index)
            waits[here] |= held
            held = {here}
            if isinstance(event, HostWaits) or (busy and isinstance(event, Launch)):
                waits[here] |= pending
                pending = set()
            if isinstance(event, Waited):
                node = ("stream", rank, index)
                waits[node] = {*stream, _end(partners, rank, event.number)}
                stream = {node}
            if isinstance(event, Launch):
                communicator, end = _communicator(rank, event), _end(partners, rank, index)
                before = {last[communicator]} if communicator in last else set()
                waits[end] |= {here, *stream, *before}
                if not before:  # ncclCommInitRank: the hosts wait for each other at its first use.
                    held |= {("host", *spot) for spot in partners.get((rank, index), [])}
                pending.add(end)
                last[communicator] = end
    return waits


def _end(partners: dict[Spot, list[Spot]], rank: int, index: int) -> Node:
    """Return the node of a collective, which is named by its launch on the first of its ranks."""
    return ("end", *min(partners.get((rank, index), [(rank, index)])))


def _described(logs: Sequence[Sequence[Event]], kind: str, rank: int, index: int) -> str:
    event: Any = logs[rank][index]
    return f"the {kind} of rank {rank} at {getattr(event, 'kind', type(event).__name__)} {getattr(event, 'line', '')}"
