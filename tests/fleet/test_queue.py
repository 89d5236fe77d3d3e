"""The queue in front of replicas that are stand-ins."""

import asyncio

import pytest

from para_core.fleet.failures import ReplicaDied, RequestCancelled
from para_core.fleet.queue import RequestQueue
from para_core.fleet.request import Request
from para_core.fleet.work import Result


class Replicas:
    """Replicas that answer when ``open`` is set."""

    def __init__(self):
        self.ran, self.cancelled, self.open = [], [], asyncio.Event()

    async def run(self, entry):
        self.ran.append(entry.id_)
        await self.open.wait()
        if entry.id_ == "dies":
            raise ReplicaDied("gone")
        entry.answer.set_result(Result((), {"id": entry.id_}))

    def cancel(self, id_):
        self.cancelled.append(id_)


def ask(queue, id_):
    return asyncio.ensure_future(queue.generate(id_, Request({"prompt": "a"}), print))


def test_cancelled_request_leaves_the_queue_at_once():
    async def run():
        replicas = Replicas()
        queue = RequestQueue(replicas, 1)
        first, second, third = (ask(queue, name) for name in ("first", "second", "third"))
        await asyncio.sleep(0)
        queue.cancel("second")
        with pytest.raises(RequestCancelled):
            await asyncio.wait_for(second, 1)
        assert replicas.cancelled == []
        queue.cancel("first")  # runs: its replica is told
        assert replicas.cancelled == ["first"]
        replicas.open.set()
        assert [(await answer).metadata["id"] for answer in (first, third)] == ["first", "third"]
        assert replicas.ran == ["first", "third"]

    asyncio.run(run())


def test_each_free_replica_takes_the_next_request():
    async def run():
        replicas = Replicas()
        queue = RequestQueue(replicas, 2)
        answers = [ask(queue, name) for name in "abc"]
        await asyncio.sleep(0.01)
        assert replicas.ran == ["a", "b"]
        replicas.open.set()
        await asyncio.gather(*answers)
        assert replicas.ran == ["a", "b", "c"]

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore")
def test_replica_that_ends_frees_its_place():
    async def run():
        replicas = Replicas()
        queue = RequestQueue(replicas, 1)
        dies, lives = ask(queue, "dies"), ask(queue, "lives")
        replicas.open.set()
        with pytest.raises(ReplicaDied):
            await dies
        assert (await lives).metadata["id"] == "lives"

    asyncio.run(run())
