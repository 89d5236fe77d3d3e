"""The queue in front of replicas that are stand-ins."""

import asyncio

import pytest

from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.jobs import Jobs
from para_core.fleet.outputs import Result
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied


class Replicas:
    """Replicas that answer when ``open`` is set."""

    def __init__(self, count):
        self.count = count
        self.ran, self.cancelled, self.open = [], [], asyncio.Event()

    async def run(self, batch):
        self.ran.append("+".join(entry.id_ for entry in batch))
        await self.open.wait()
        if batch[0].id_ == "dies":
            raise RankDied("gone")
        for entry in batch:
            entry.finish(Result((), {"id": entry.id_}))

    def cancel(self, job):
        self.cancelled.append(job.id_)


def ask(jobs, id_, **fields):
    return jobs.start(Request({"prompt": id_, **fields}, seed=len(id_)), id_).task


def test_cancelled_request_leaves_the_queue_at_once():
    async def run():
        replicas = Replicas(1)
        jobs = Jobs(replicas, ServerOptions())
        first, second, third = (ask(jobs, name) for name in ("first", "second", "third"))
        await asyncio.sleep(0)
        jobs.cancel("second")
        with pytest.raises(Cancelled):
            await asyncio.wait_for(second, 1)
        assert replicas.cancelled == []
        jobs.cancel("first")  # The request runs, so its replica is told.
        assert replicas.cancelled == ["first"]
        replicas.open.set()
        assert [(await answer).metadata["id"] for answer in (first, third)] == ["first", "third"]
        assert replicas.ran == ["first", "third"]

    asyncio.run(run())


def test_each_free_replica_takes_the_next_request():
    async def run():
        replicas = Replicas(2)
        jobs = Jobs(replicas, ServerOptions())
        answers = [ask(jobs, name) for name in "abc"]
        await asyncio.sleep(0.01)
        assert replicas.ran == ["a", "b"]
        replicas.open.set()
        await asyncio.gather(*answers)
        assert replicas.ran == ["a", "b", "c"]

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore")
def test_replica_that_ends_frees_its_place():
    async def run():
        replicas = Replicas(1)
        jobs = Jobs(replicas, ServerOptions())
        dies, lives = ask(jobs, "dies"), ask(jobs, "lives")
        replicas.open.set()
        with pytest.raises(RankDied):
            await dies
        assert (await lives).metadata["id"] == "lives"

    asyncio.run(run())


def test_requests_that_differ_in_prompt_and_seed_are_one_batch():
    async def run():
        replicas = Replicas(1)
        jobs = Jobs(replicas, ServerOptions(max_batch=3), fits=lambda requests: len(requests) < 4)
        busy = ask(jobs, "busy")
        fields = {"height": 64}
        answers = [ask(jobs, name, **fields) for name in ("a", "b")]
        answers += [ask(jobs, "other", height=32), ask(jobs, "c", **fields), ask(jobs, "d", **fields)]
        answers.append(ask(jobs, "several", num_images_per_prompt=2, **fields))
        await asyncio.sleep(0)
        jobs.cancel("b")
        replicas.open.set()
        results = await asyncio.gather(busy, *answers, return_exceptions=True)
        assert replicas.ran == ["busy", "a+c+d", "other", "several"]
        assert isinstance(results[2], Cancelled)
        assert [result.metadata["id"] for result in results if isinstance(result, Result)][1:] == [
            *("a", "other", "c", "d", "several")
        ]

    asyncio.run(run())


def test_retried_request_can_be_cancelled_when_its_first_replica_is_back():
    class Dying(Replicas):
        def __init__(self, count):
            super().__init__(count)
            self.restarted = asyncio.Event()

        async def run(self, batch):
            if not self.ran:
                self.ran.append("died")
                batch[0].finish(RankDied("gone"))
                await self.restarted.wait()
            else:
                await super().run(batch)

    async def run():
        replicas = Dying(2)
        jobs = Jobs(replicas, ServerOptions(retries=1))
        answer = ask(jobs, "a")
        await asyncio.sleep(0.01)
        replicas.restarted.set()
        await asyncio.sleep(0.01)
        assert replicas.ran == ["died", "a"]
        jobs.cancel("a")
        assert replicas.cancelled == ["a"]
        replicas.open.set()
        assert (await answer).metadata["id"] == "a"

    asyncio.run(run())
