"""The replicas of a :class:`Pool` as stand-ins: their number, cancelling, and a replica that died."""

import asyncio

import pytest
from diffusers import FluxKontextPipeline

pytest.importorskip("ray", reason="the extra fleet is not installed: make test-fleet")

from para_core.fleet import group
from para_core.fleet.failures import ReplicaDied
from para_core.fleet.models import describe
from para_core.fleet.outputs import Result
from para_core.fleet.pool import Pool
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.reading import ServerOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.server import Server


class StandIn:
    """A replica that answers when ``open`` is set."""

    made = ()  # of each test, set by the fixture

    def __init__(self, recipe, options, name):
        self.actors, self.starts, self.ran, self.open, self.failing = [], 0, [], asyncio.Event(), 0
        self.made.append(self)

    async def start(self):
        self.starts += 1
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the cluster is busy.")
        self.actors, self.dead = [self], False

    async def stop(self):
        self.actors = []

    async def alive(self):
        return bool(self.actors) and not self.dead

    async def generate(self, request):
        (outcome,) = await self.generate_batch([("own", request)])
        return outcome

    async def generate_batch(self, batch, progress=None):
        self.ran.append([id_ for id_, _ in batch])
        await self.open.wait()
        if not self.actors or self.dead:
            await self.stop()
            raise ReplicaDied("rank 0 died.")
        return [Result((), {"id": id_}) for id_, _ in batch]


@pytest.fixture
def made(monkeypatch):
    """Return the stand-ins of the pools that a test makes, in their order."""
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(group, "Replica", StandIn)
    monkeypatch.setattr(group, "connect", lambda ranks, debug: None)
    monkeypatch.setattr(group, "require_cluster", lambda options, replicas: None)
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
