"""The checker of NCCL's order: planted faults in logs of two ranks, and logs that are right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated_gpu.order import problems
from tests.simulated_gpu.record import Event, HostWaits, Launch, Waited


def log_of(*events: Any) -> list[Event]:
    """Return a log. A dict is a launch, ``"wait"`` waits for the launch before it, ``"sync"`` is the host."""
    log: list[Event] = []
    for event in events:
        if event == "sync":
            log.append(HostWaits())
        elif event == "wait":
            log.append(Waited(max(x.number for x in log if isinstance(x, Launch))))
        else:
            group = {"group": "w", "ranks": (0, 1), "kind": "all_gather", "dtype": "float32", "sizes": (8,)}
            log.append(Launch(**{"number": len(log), **group, **event}))
    return log


def all_to_all(sent: tuple[int, int], received: tuple[int, int]) -> dict[str, Any]:
    return {"kind": "all_to_all", "sizes": sent, "received": received}


SEND = {"kind": "send", "peer": 1}
# Name: the logs of both ranks, and words of the problem.
LOGS = {
    "the same": ([log_of({}, "wait", "sync", {})] * 2, ""),
    "uneven all-to-all": ([log_of(all_to_all((2, 3), (2, 1))), log_of(all_to_all((1, 4), (3, 4)))], ""),
    "send and receive": ([log_of(SEND), log_of({"kind": "recv", "peer": 0})], ""),
    "two groups in one order": ([log_of({"group": "a"}, "wait", {"group": "b"}, "wait", "sync")] * 2, ""),
    "a group of one rank": ([log_of({"ranks": (0,)}), log_of()], ""),
    "sizes": ([log_of({}), log_of({"sizes": (9,)})], "sizes"),
    "dtypes": ([log_of({}), log_of({"dtype": "int8"})], "dtypes"),
    "kinds": ([log_of({}), log_of({"kind": "broadcast"})], "different collectives"),
    "numbers": ([log_of({}), log_of()], "different numbers"),
    "what an all-to-all sends": ([log_of(all_to_all((2, 3), (2, 1))), log_of(all_to_all((1, 4), (2, 4)))], "takes 2"),
    "two sends": ([log_of(SEND), log_of({"kind": "send", "peer": 0})], "both ranks"),
    "sizes of a pair": ([log_of(SEND), log_of({"kind": "recv", "peer": 0, "sizes": (9,)})], "differ"),
    "crossed groups": ([log_of({"group": a}, "wait", {"group": b}, "wait", "sync") for a, b in ("ab", "ba")], "hang"),
}


@pytest.mark.parametrize("name", LOGS)
def test_wrong_order_is_a_problem(name):
    logs, words = LOGS[name]
    for busy in (False, True):
        found = problems(logs, busy_hosts=busy)
        assert any(words in problem for problem in found) if words else not found


def test_early_receive_hangs_only_if_the_host_waits_or_communicators_are_lazy():
    # Each rank posts the receive of what the other one sends only later.
    early = [
        log_of({"group": "ba", "kind": "recv", "peer": 1}, {"group": "ab", "kind": "send", "peer": 1}, "wait"),
        log_of({"group": "ab", "kind": "recv", "peer": 0}, "wait", {"group": "ba", "kind": "send", "peer": 0}),
    ]
    assert problems(early, lazy_communicators=False) == []
    assert any("hang" in problem for problem in problems(early, lazy_communicators=False, busy_hosts=True))
    assert any("hang" in problem for problem in problems(early))
