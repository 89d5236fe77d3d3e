"""The replicas of a :class:`Pool` as stand-ins: their number, cancelling, and a replica that died."""

import asyncio

import pytest
from diffusers import FluxKontextPipeline

from para_core.fleet.http import pool
from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.jobs import Job, Jobs, Metrics
from para_core.fleet.http.pool import Pool
from para_core.fleet.http.server import Server
from para_core.fleet.outputs import Result
from para_core.fleet.pipeline_info import describe
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied


class StandIn:
    """A replica that answers when ``open`` is set."""

    made = ()  # of each test, set by the fixture

    def __init__(self):
        self.running, self.starts, self.ran, self.open, self.failing = False, 0, [], asyncio.Event(), 0
        self.made.append(self)

    async def start(self):
        self.starts += 1
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the cluster is busy.")
        self.running, self.dead = True, False

    def cancel(self, id_):
        """Ignore it, as a rank that dies before it sees a cancellation."""

    async def stop(self):
        self.running = False

    async def alive(self):
        return self.running and not self.dead

    async def generate(self, request):
        (outcome,) = await self.generate_batch([("own", request)])
        return outcome

    async def generate_batch(self, batch, progress=None):
        self.ran.append([id_ for id_, _ in batch])
        await self.open.wait()
        if not self.running or self.dead:
            await self.stop()
            raise RankDied("rank 0 died.")
        return [Result((), {"id": id_}) for id_, _ in batch]


@pytest.fixture
def made(monkeypatch):
    """Return the stand-ins of the pools that a test makes, in their order."""
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(pool, "make_replicas", lambda recipe, options, count: [StandIn() for _ in range(count)])
    return StandIn.made


def make_pool(replicas):
    return Pool(Recipe("none"), ReplicaOptions(), replicas)


def ask(jobs, id_):
    return jobs.start(Request({"prompt": id_}, seed=0), id_)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replicas", [0, -1])
def test_number_of_replicas_is_validated(replicas):
    with pytest.raises(ValueError, match=f"replicas is {replicas}"):
        make_pool(replicas)


def test_server_uses_all_replicas_of_its_pool(made):
    async def run():
        replicas = make_pool(3)
        server = Server(replicas, describe("", FluxKontextPipeline, {}), ServerOptions(waiting=1))
        jobs = server._jobs
        await replicas.start()
        running = [ask(jobs, name) for name in "abcd"]
        await until(lambda: sum(len(each.ran) for each in made) == 3)
        with pytest.raises(Exception, match="at most 4"):
            jobs.require_room()
        assert b'"replicas":3' in (await server._health()).body
        for each in made:
            each.open.set()
        assert [(await job.task).metadata["id"] for job in running] == ["a", "b", "c", "d"]
        await replicas.stop()

    asyncio.run(run())


@pytest.fixture
def quick(monkeypatch):
    """Let a pool look for dead replicas all the time."""
    monkeypatch.setattr(pool, "_WATCH_SECONDS", 0.01)


def test_replica_that_dies_while_idle_starts_again(made, quick):
    async def run():
        replicas = make_pool(2)
        await replicas.start()
        made[0].dead, made[0].failing = True, 2  # the first two attempts fail
        await until(lambda: made[0].starts == 4)
        await asyncio.sleep(0.1)
        assert [each.starts for each in made] == [4, 1]
        assert await replicas.ready() == 2
        for each in made:
            each.open.set()
        # Both are free, each once.
        await asyncio.gather(*[replicas.generate(None) for _ in range(2)])
        assert [len(each.ran) for each in made] == [1, 1]
        await replicas.stop()
        await asyncio.sleep(0.1)
        assert [each.starts for each in made] == [4, 1]

    asyncio.run(run())


def test_busy_replica_that_dies_starts_again_once(made, quick):
    async def run():
        replicas = make_pool(1)
        await replicas.start()
        answer = asyncio.ensure_future(replicas.generate(None))
        await until(lambda: made[0].ran)
        made[0].dead = True
        await asyncio.sleep(0.1)
        assert made[0].starts == 1
        made[0].open.set()
        with pytest.raises(RankDied):
            await answer
        assert (made[0].starts, await replicas.ready()) == (2, 1)
        await replicas.stop()

    asyncio.run(run())


def test_replica_of_a_stopped_pool_does_not_start_again(made):
    async def run():
        replicas = make_pool(1)
        await replicas.start()
        answer = asyncio.ensure_future(replicas.generate(None))
        await until(lambda: made[0].ran)
        await replicas.stop()
        made[0].open.set()
        with pytest.raises(RankDied):
            await answer
        assert (made[0].starts, made[0].running) == (1, False)

    asyncio.run(run())


def test_request_that_waits_for_a_replica_is_cancelled_at_once(made):
    async def run():
        replicas = make_pool(1)
        await replicas.start()
        jobs = Jobs(replicas, ServerOptions(max_batch=2))
        own = asyncio.ensure_future(replicas.generate(None))  # takes the replica besides the queue
        await until(lambda: made[0].ran)
        first = ask(jobs, "first")
        await asyncio.sleep(0.01)
        jobs.cancel("first")
        with pytest.raises(Cancelled):
            await asyncio.wait_for(asyncio.shield(first.task), 1)
        second = ask(jobs, "second")
        made[0].open.set()
        assert (await second.task).metadata["id"] == "second"
        await own
        assert made[0].ran == [["own"], ["second"]]
        await replicas.stop()

    asyncio.run(run())


def test_cancelled_request_of_a_batch_that_waits_is_left_out(made):
    async def run():
        replicas = make_pool(1)
        await replicas.start()
        own = asyncio.ensure_future(replicas.generate(None))
        await until(lambda: made[0].ran)
        batch = [Job(name, Request({"prompt": name}, seed=0), Metrics()) for name in "ab"]
        for job in batch:
            job.answer = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(replicas.run(batch))
        await asyncio.sleep(0.01)
        replicas.cancel(batch[0])
        made[0].open.set()
        await asyncio.gather(own, running)
        assert isinstance(batch[0].answer.exception(), Cancelled)
        assert batch[1].answer.result().metadata["id"] == "b"
        assert made[0].ran == [["own"], ["b"]]
        await replicas.stop()

    asyncio.run(run())


def test_cancelled_request_is_not_retried_after_its_replica_died(made):
    async def run():
        replicas = make_pool(1)
        await replicas.start()
        jobs = Jobs(replicas, ServerOptions(retries=1))
        job = ask(jobs, "a")
        await until(lambda: made[0].ran)
        jobs.cancel("a")
        made[0].dead = True
        made[0].open.set()
        with pytest.raises(Cancelled):
            await job.task
        assert made[0].ran == [["a"]]
        await replicas.stop()

    asyncio.run(run())
