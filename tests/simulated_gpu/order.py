"""Whether the collectives of all ranks would end on NCCL: the same order and sizes, and nobody waiting in a circle.

Each communicator has a stream on each rank. A collective starts behind all that the compute stream had waited for when
it was launched, and ends once all its ranks have started it. A host that waits is held until its device has nothing
left to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulated_gpu.record import Event, HostWaits, Launch, Waited

Communicator = tuple[str, tuple[int, ...]]
Spot = tuple[int, int]  # A rank, and the index of an event in its log.


def problems(
    logs: Sequence[Sequence[Event]], *, busy_hosts: bool = False, lazy_communicators: bool = True
) -> list[str]:
    """Return what is wrong with the logs of all ranks, a sentence each.

    Args:
        busy_hosts: whether a host may also wait for its device at any launch, as it does to load a kernel or to
            allocate memory.
        lazy_communicators: whether a communicator is made at its first use, where the hosts wait for each other.
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
    return found + _stuck(logs, partners, busy_hosts, lazy_communicators)


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


@dataclass
class _Rank:
    """The progress of the host and the device of one rank."""

    log: Sequence[Event]
    host: int = 0
    launched: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    # What has to end before a launch starts: what the compute stream waits for, and the last one of its communicator.
    before: dict[int, set[int]] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    last: dict[Communicator, int] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return self.launched <= self.ended


def _stuck(
    logs: Sequence[Sequence[Event]], partners: dict[Spot, list[Spot]], busy_hosts: bool, lazy: bool
) -> list[str]:
    """Run all hosts and devices. Return what they wait for if they do not end."""
    ranks = [_Rank(log) for log in logs]
    moved = True
    while moved:
        moved = False
        for number in range(len(ranks)):
            moved |= _run_host(number, ranks, partners, busy_hosts, lazy)
            moved |= _run_device(number, ranks, partners)
    if all(rank.host == len(rank.log) and rank.is_idle for rank in ranks):
        return []
    return [_where(number, rank) for number, rank in enumerate(ranks) if rank.host < len(rank.log) or not rank.is_idle]


def _run_host(number: int, ranks: list[_Rank], partners: dict[Spot, list[Spot]], busy_hosts: bool, lazy: bool) -> bool:
    """Let the host of a rank go on until it is held. Return whether anything happened."""
    rank, moved = ranks[number], False
    while rank.host < len(rank.log):
        index, event = rank.host, rank.log[rank.host]
        if isinstance(event, HostWaits) and not rank.is_idle:
            break
        if isinstance(event, Waited):
            rank.awaited.add(event.number)
        if isinstance(event, Launch):
            communicator = _communicator(number, event)
            is_first = communicator not in rank.last or rank.last[communicator] == index
            if index not in rank.launched:
                if busy_hosts and not rank.is_idle:
                    break
                rank.launched.add(index)
                last = {rank.last[communicator]} if communicator in rank.last else set()
                rank.before[index], rank.last[communicator] = rank.awaited | last, index
                moved = True
            others = partners.get((number, index), [])
            if lazy and is_first and not all(spot in ranks[other].launched for other, spot in others):
                break  # ncclCommInitRank
        rank.host += 1
        moved = True
    return moved


def _run_device(number: int, ranks: list[_Rank], partners: dict[Spot, list[Spot]]) -> bool:
    """End the collectives of a rank that all their ranks have started. Return whether there was one."""
    moved = False
    for index in sorted(ranks[number].launched - ranks[number].ended):
        together = partners.get((number, index), [])
        if together and all(
            spot in ranks[other].launched and ranks[other].before[spot] <= ranks[other].ended
            for other, spot in together
        ):
            for other, spot in together:
                ranks[other].ended.add(spot)
            moved = True
    return moved


def _where(number: int, rank: _Rank) -> str:
    host = rank.log[rank.host] if rank.host < len(rank.log) else "its end"
    pending = sorted(rank.launched - rank.ended)
    device = rank.log[pending[0]] if pending else "nothing"
    return f"hang: the host of rank {number} is at {host}, its device at {device}"
