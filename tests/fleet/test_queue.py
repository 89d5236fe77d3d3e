"""The queue, the pool and the lines of stand-ins for replicas: order, batches, cancelling, and replicas that died."""

import asyncio
from itertools import chain, repeat
from unittest import mock

import pytest
from diffusers import FluxKontextPipeline
from starlette.requests import Request as HttpRequest

from para_core.fleet import replicas
from para_core.fleet.failures import RequestFailed
from para_core.fleet.http import pool
from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.jobs import Job, Jobs, Metrics
from para_core.fleet.http.pool import Pool
from para_core.fleet.http.server import Server
from para_core.fleet.outputs import Result
from para_core.fleet.pipeline_info import describe_class
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied


class StandIn:
    """A replica that answers when ``open`` is set."""

    def __init__(self):
        self.running, self.starts, self.ran, self.cancelled = False, 0, [], []
        self.open, self.failing, self.dead = asyncio.Event(), 0, False

    async def start(self):
        self.starts += 1
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the cluster is busy.")
        self.running, self.dead = True, False

    def cancel(self, id_):
        self.cancelled.append(id_)

    async def stop(self):
        self.running = False

    async def alive(self):
        return self.running and not self.dead

    async def generate(self, request):
        return (await self.generate_batch([("own", request)]))[0]

    async def generate_batch(self, batch, progress=None):
        self.ran.append("+".join(id_ for id_, _ in batch))
        await self.open.wait()
        if not self.running or self.dead:
            await self.stop()
            raise RankDied("rank 0 died.")
        return [Result((), {"id": id_}) for id_, _ in batch]


class Mortal(StandIn):
    """A replica whose ranks die of the request "deadly", and which cannot run "bad"."""

    async def generate(self, request):
        prompt = request.fields["prompt"]
        if prompt == "bad":
            raise RequestFailed(prompt)
        self.running = prompt != "deadly"
        if not self.running:
            raise RankDied(prompt)
        return prompt


@pytest.mark.parametrize(
    ("prompts", "count", "starts", "failed"),
    [(["deadly"], 8, [2], [1]), (["deadly", "bad", "a", "deadly"], 1, [4], [1, 2, 4]), (["a", "b"], 2, [1, 1], [])],
)
def test_replica_starts_for_a_waiting_line_only(monkeypatch, prompts, count, starts, failed):
    made, written = [], []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(replicas, "make_replicas", lambda *args: made.extend(Mortal() for _ in range(args[2])) or made)
    lines = [Line(number, Request({"prompt": prompt}, seed=0)) for number, prompt in enumerate(prompts, start=1)]
    options = Recipe("none"), ReplicaOptions(1), count
    problems = replicas.generate_lines(lines, *options, write=lambda line, result: written.append(line.number))
    assert [replica.starts for replica in made] == starts
    assert [problem.number for problem in problems] == failed
    assert sorted([*written, *failed]) == [line.number for line in lines]


def with_pool(count=1, watch=1.0):
    """Return a decorator that makes a test of an async function of a started pool and its replicas."""

    def decorate(test):
        def run(monkeypatch):
            monkeypatch.setattr(pool, "make_replicas", lambda recipe, options, count: [StandIn() for _ in range(count)])
            monkeypatch.setattr(pool, "_WATCH_SECONDS", watch)

            async def started():
                replicas = Pool(Recipe("none"), ReplicaOptions(), count)
                await replicas.start()
                await test(replicas, *replicas._replicas)
                await replicas.stop()

            asyncio.run(started())

        return run

    return decorate


def ask(jobs, id_, **fields):
    return jobs.start(Request({"prompt": id_, **fields}, seed=len(id_)), id_)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def open_and_collect(replicas, jobs):
    """Let the replicas answer, and return the ids of the results, or the types of the errors."""
    for each in replicas:
        each.open.set()
    outcomes = await asyncio.gather(*[job.task for job in jobs], return_exceptions=True)
    return [outcome.metadata["id"] if isinstance(outcome, Result) else type(outcome) for outcome in outcomes]


@with_pool(3)
async def test_server_uses_all_replicas_of_its_pool_in_order(replicas, *each):
    server = Server(replicas, describe_class("", FluxKontextPipeline, {}), ServerOptions(waiting=1))
    running = [ask(server._jobs, name) for name in "abcd"]
    await until(lambda: sum(len(x.ran) for x in each) == 3)
    assert [x.ran for x in each] == [["a"], ["b"], ["c"]]
    with pytest.raises(Exception, match="at most 4"):
        server._jobs.require_room()
    assert b'"replicas":3' in (await server._health()).body
    assert await open_and_collect(each, running) == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="replicas is 0"):
        Pool(Recipe("none"), ReplicaOptions(), 0)


@with_pool()
async def test_cancelled_request_leaves_the_queue_at_once_and_a_running_one_is_told(replicas, replica):
    jobs = Jobs(replicas, ServerOptions())
    first, second, third = (ask(jobs, name) for name in ("first", "second", "third"))
    await until(lambda: replica.ran)
    jobs.cancel("second")
    with pytest.raises(Cancelled):
        await asyncio.wait_for(second.task, 1)
    assert replica.cancelled == []
    jobs.cancel("first")
    assert replica.cancelled == ["first"]
    assert await open_and_collect([replica], [first, third]) == ["first", "third"]
    assert replica.ran == ["first", "third"]


@with_pool()
async def test_requests_that_differ_in_prompt_and_seed_are_one_batch(replicas, replica):
    jobs = Jobs(replicas, ServerOptions(max_batch=3), fits=lambda requests: sum(x.seed for x in requests) < 7)
    busy = ask(jobs, "busy")
    running = [ask(jobs, name, height=64) for name in ("a", "b")]
    running += [ask(jobs, "other", height=32), *(ask(jobs, name, height=64) for name in ("c", "d", "e"))]
    running += [ask(jobs, "several", num_images_per_prompt=2, height=64), ask(jobs, "eeeeee", height=64)]
    await until(lambda: replica.ran)
    jobs.cancel("b")
    replica.open.set()
    replica.open.clear()
    await until(lambda: len(replica.ran) == 2)
    assert (replica.ran[1], jobs.waiting) == ("a+c+d", 4)
    names = ["busy", "a", Cancelled, "other", "c", "d", "e", "several", "eeeeee"]
    assert await open_and_collect([replica], [busy, *running]) == names
    assert replica.ran == ["busy", "a+c+d", "other", "e", "several", "eeeeee"]


def test_replica_that_dies_while_idle_starts_again(monkeypatch, caplog):
    @with_pool(2, watch=0.01)
    async def test(replicas, first, second):
        first.dead, first.failing = True, 2  # the first two attempts fail
        await until(lambda: first.starts == 4)
        await asyncio.sleep(0.1)
        assert ([first.starts, second.starts], await replicas.ready()) == ([4, 1], 2)
        first.open.set()
        second.open.set()
        # Both are free, each once.
        await asyncio.gather(*[replicas.generate(None) for _ in range(2)])
        assert first.ran == second.ran == ["own"]
        # The watch goes on after an error, here a TypeError.
        alive, first.alive = first.alive, None
        await until(lambda: "the next attempt follows" in caplog.text)
        first.alive, first.dead = alive, True
        await until(lambda: first.starts == 5)
        await replicas.stop()
        await asyncio.sleep(0.05)
        assert first.starts == 5

    test(monkeypatch)


@with_pool(2, watch=0.05)
async def test_replica_that_cannot_start_again_is_given_to_no_batch(replicas, bad, good):
    bad.open.set()
    good.open.set()
    bad.dead, bad.failing = True, 3
    answers = await asyncio.gather(*[replicas.generate(None) for _ in range(6)], return_exceptions=True)
    assert [type(answer) for answer in answers].count(RankDied) == 1
    assert (bad.ran, len(good.ran)) == (["own"], 5)
    await until(lambda: bad.starts == 5)


@with_pool()
async def test_stopped_pool_tells_the_calls_that_wait(replicas, replica):
    waiting = [asyncio.ensure_future(replicas.generate(None)) for _ in range(3)]
    await until(lambda: replica.ran)
    await replicas.stop()
    replica.open.set()
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2)
    assert [type(answer) for answer in answers] == [RankDied] * 3
    assert (replica.starts, replica.running) == (1, False)
    with pytest.raises(RankDied, match="stopped"):
        await replicas.run([])
    await replicas.start()
    assert (await replicas.generate(None)).metadata["id"] == "own"


@with_pool(watch=0.01)
async def test_busy_replica_that_dies_starts_again_once_and_frees_its_place(replicas, replica):
    jobs = Jobs(replicas, ServerOptions())
    dies, lives = ask(jobs, "dies"), ask(jobs, "lives")
    await until(lambda: replica.ran)
    replica.dead = True
    await asyncio.sleep(0.05)
    assert replica.starts == 1
    assert await open_and_collect([replica], [dies, lives]) == [RankDied, "lives"]
    assert (replica.starts, await replicas.ready()) == (2, 1)


@with_pool()
async def test_requests_that_wait_for_a_replica_are_cancelled_at_once(replicas, replica):
    jobs = Jobs(replicas, ServerOptions(max_batch=2))
    own = asyncio.ensure_future(replicas.generate(None))  # takes the replica besides the queue
    await until(lambda: replica.ran)
    first = ask(jobs, "first")
    await asyncio.sleep(0.01)
    jobs.cancel("first")
    with pytest.raises(Cancelled):
        await asyncio.wait_for(asyncio.shield(first.task), 1)
    second = ask(jobs, "second")
    # One of a batch that waits is left out of it.
    batch = [Job(name, Request({"prompt": name}, seed=0), Metrics()) for name in "ab"]
    for job in batch:
        job.answer = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(replicas.run(batch))
    await asyncio.sleep(0.01)
    replicas.cancel(batch[0])
    assert await open_and_collect([replica], [second]) == ["second"]
    await asyncio.gather(own, running)
    assert isinstance(batch[0].answer.exception(), Cancelled)
    assert batch[1].answer.result().metadata["id"] == "b"
    assert sorted(replica.ran) == ["b", "own", "second"]


@with_pool()
async def test_stream_whose_client_left_before_its_first_event_ends(replicas, replica):
    body = {"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}
    receive = mock.AsyncMock(side_effect=chain([body], repeat({"type": "http.disconnect"})))
    scope = {"type": "http", "path": "/v1/images/generations", "headers": [(b"content-type", b"application/json")]}
    server = Server(replicas, describe_class("", FluxKontextPipeline, {}), ServerOptions())
    await server._generate(HttpRequest(scope, receive))  # nobody reads the response
    await until(lambda: replica.cancelled)
    replica.open.set()
    await until(lambda: server.unfinished == 0)


@with_pool()
async def test_cancelled_request_is_not_retried_after_its_replica_died(replicas, replica):
    job = ask(jobs := Jobs(replicas, ServerOptions(retries=1)), "a")
    await until(lambda: replica.ran)
    jobs.cancel("a")
    replica.dead = True
    assert await open_and_collect([replica], [job]) == [Cancelled]
    assert replica.ran == ["a"]
