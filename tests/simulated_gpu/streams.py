"""Streams, events and the host's waits, as a race detector: who may read which memory at which time.

Each stream has a clock that ticks with its operators, and knows how far the others are by what it has waited for. An
access of memory that another stream wrote or read later than this one knows is a fault: on a GPU its result depends on
luck. Non-blocking copies to pinned memory deliver NaN until the host has waited for them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.simulated_gpu.record import HostWaits, line, record

Clock = Counter[int]  # By number of stream, how many of its operators have ended. The union takes the larger number.
_numbers = itertools.count(1)


class Stream:
    """A queue of the device, in the place of ``torch.cuda.Stream``."""

    made: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = self.stream_id = self.cuda_stream = next(_numbers)
        Stream.made[self.number] = self
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.known: Clock = Counter()

    def tick(self) -> int:
        self.known[self.number] += 1
        return self.known[self.number]

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known

    def wait_event(self, event: Event) -> None:
        self.known |= event.clock

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("Stream.synchronize", self.known)

    def __enter__(self) -> Stream:
        _entered().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """A point of a stream, in the place of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or current()).known.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        host_waits("Event.synchronize", self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Return a millisecond: time is not simulated."""
        return 1.0


@dataclass
class _Memory:
    """The last accesses of one storage: by stream, its time and the line."""

    write: tuple[int, int, str] = (0, 0, "")
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class _Late:
    """Something that happens in host memory when the host has waited for the stream up to ``time``."""

    stream: int
    time: int
    happen: Callable[[], Any]


@dataclass
class _Device:
    """The state of the one device of this process. ``index`` is set once, by ``torch.cuda.set_device``."""

    index: int | None = None
    memory: dict[int, _Memory] = field(default_factory=dict)
    known_to_host: Clock = field(default_factory=Counter)
    late: list[_Late] = field(default_factory=list)


device = _Device()


def start_again() -> None:
    """Forget what is in flight, for the next job of this process."""
    device.memory.clear()
    device.late.clear()


_local = threading.local()
_default: list[Stream] = []


def default() -> Stream:
    if not _default:
        _default.append(Stream())
    return _default[0]


def _entered() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = [default()]
    streams: list[Stream] = _local.streams
    return streams


def current() -> Stream:
    return _entered()[-1]


def set_current(stream: Stream) -> None:
    _entered()[-1] = stream


def host_waits(why: str, until: Clock | None = None) -> None:
    """Count a wait of the host for ``until`` (the current stream), unless it has waited that long before."""
    clock = current().known if until is None else until
    if not clock - device.known_to_host:
        return
    record.count("waits", why)
    record.add(HostWaits())
    device.known_to_host |= clock
    arrived = [late for late in device.late if late.time <= device.known_to_host[late.stream]]
    device.late = [late for late in device.late if late not in arrived]
    for late in arrived:
        late.happen()


def synchronize(_: Any = None) -> None:
    """Wait for all streams: ``torch.cuda.synchronize``."""
    host_waits("torch.cuda.synchronize", Counter({number: x.known[number] for number, x in Stream.made.items()}))


def write_later(into: Tensor, value: Tensor) -> None:
    """Fill pinned ``into`` with garbage until the host has waited for the current stream."""
    arriving = value.to(into.dtype).expand(into.shape).clone()
    if into.is_floating_point() or into.is_complex():
        into.fill_(float("nan"))
    elif into.dtype == torch.bool:
        into.copy_(~arriving)
    else:
        into.fill_(torch.iinfo(into.dtype).max)
    device.late.append(_Late(current().number, current().tick(), lambda: into.copy_(arriving)))


def read_later(source: Tensor) -> None:
    """Report a change of pinned ``source`` before the host has waited for the current stream."""
    before, at = source.clone(), line()

    def compare() -> None:
        if not same_bytes(before, source):
            record.fault("pinned memory was changed before its copy to the device had ended", at=at)

    device.late.append(_Late(current().number, current().tick(), compare))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextmanager
def accessing(reads: list[Tensor], writes: list[Tensor]) -> Iterator[None]:
    """Run one operator on the current stream. Raise if another stream may still write or read its memory."""
    stream = current()
    time = stream.tick()
    at = line() if stream != default() else "the default stream"
    for x in reads:
        memory = device.memory.setdefault(_key(x), _Memory())
        _require_seen(stream, memory.write[0], memory.write[1], "writes", memory.write[2])
        memory.reads[stream.number] = (time, at)
    for x in writes:
        memory = device.memory.setdefault(_key(x), _Memory())
        _require_seen(stream, memory.write[0], memory.write[1], "writes", memory.write[2])
        for number, (read, place) in memory.reads.items():
            _require_seen(stream, number, read, "reads", place)
    yield
    for x in writes:
        device.memory[_key(x)] = _Memory((stream.number, time, at))


def _require_seen(stream: Stream, other: int, time: int, verb: str, place: str) -> None:
    # What the host has waited for has ended before anything that it launches now.
    if other != stream.number and time > max(stream.known[other], device.known_to_host[other]):
        record.fault(f"an operator uses memory that another stream still {verb} ({place}): wait_stream or wait_event")


def made_by_current(x: Tensor) -> None:
    """Remember that the last operator of the current stream has made the memory of ``x``."""
    stream = current()
    device.memory[_key(x)] = _Memory((stream.number, stream.known[stream.number], "an operator"))


def allocated(x: Tensor) -> None:
    """Remember that the memory of ``x`` is new: nobody has written or read it."""
    device.memory.pop(_key(x), None)
