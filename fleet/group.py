"""Replicas on Ray: ranks as actors in one placement group, which run one pipeline.

replicas.py makes a :class:`RayReplica` for each group of ranks, if a process is connected to a cluster by
`ray_cluster.py`. The other half is rank_actor.py, which runs in the ranks; replica.py has the contract, which
LocalReplica keeps, too. Tests: tests/fleet/test_ray.py with stand-ins for Ray, and test_replicas.py with a
cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from para_core.fleet.failures import RequestFailed
from para_core.fleet.last_words import Notes, describe_death
from para_core.fleet.log_relay import log_entries
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.rank_actor import CONTROL, Answer, RankActor
from para_core.fleet.ray_cluster import describe_cause, resources_of_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.replica import Replica
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied

# Seconds between two reads of the number of finished steps from the first rank.
_POLL_SECONDS = 0.1
# Seconds for the other ranks to answer after one rank failed or was cancelled. They are at most one step
# behind that rank, and a rank that waits for it in a collective never answers.
_GRACE_SECONDS = 30.0
# Seconds after which a rank that does not answer a ping hangs. It answers while it generates, too.
_PING_SECONDS = 30.0
logger = logging.getLogger(__name__)


class RayReplica(Replica):
    """A :class:`~para_core.fleet.replica.Replica` of Ray actors.

    :meth:`stop` may be called while another method waits for the actors, which then end with Ray's errors.
    Such a method keeps the list ``actors`` with which it began: if the attribute is another list later, the
    replica was stopped, and no rank has died by itself.
    """

    def __init__(self, recipe: Recipe, options: ReplicaOptions, name: str = "replica") -> None:
        super().__init__(name)
        self._recipe = recipe
        self._options = options
        self._placement: Any = None
        self.actors: list[Any] = []
        self._processes: list[tuple[int, Notes]] = []  # process id and notes of each rank
        self._dead: set[int] = set()  # ranks whose end was logged
        self._batches = 0  # number of calls that were begun, by which the actors tell them apart

    async def _load(self) -> None:
        actors = self.actors  # an empty list, which no earlier start has
        try:
            await self._place_actors(actors)
            await self._load_actors(actors)
        except ray.exceptions.RayError as error:
            raise RuntimeError(describe_cause(error)) from error

    async def _place_actors(self, actors: list[Any]) -> None:
        """Reserve a placement group, create an actor for each rank in it, and append them to ``actors``.

        Raise RuntimeError if the cluster has no free resources within the recipe's timeout, and RankDied if
        the replica was stopped meanwhile.
        """
        bundle, ranks, seconds = resources_of_rank(), self._options.ranks, self._recipe.timeout
        logger.info("%s: starting %d ranks", self._name, ranks)
        strategy = "STRICT_PACK"
        if self._options.spread:
            strategy = "PACK"
        placement = self._placement = placement_group([bundle] * ranks, strategy=strategy)
        try:
            await asyncio.wait_for(placement.ready(), seconds)
        except TimeoutError:
            raise RuntimeError(
                f"a replica of {ranks} ranks got no resources within {seconds:g} s: the Ray cluster is busy."
            ) from None
        self._check_not_stopped(actors)
        # While generate_batch or join runs, progress, cancel, ping and loading_log are answered by these four
        # threads of the actor.
        actor = ray.remote(concurrency_groups={CONTROL: 4})(RankActor)
        # Ray must not restart a rank alone: the other ranks would wait for it, so the whole replica restarts.
        resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        for rank in range(ranks):
            scheduling = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
            of_rank = actor.options(scheduling_strategy=scheduling, **resources)
            actors.append(of_rank.remote(self._recipe, rank, self._options))

    async def _load_actors(self, actors: Sequence[Any]) -> None:
        """Connect the ranks and load the pipeline on them. Raise RankDied or Ray's error if one cannot, or
        the replica was stopped meanwhile.
        """
        # Ranks watch signals before they load, so that a death while loading has its reason, too.
        watched = await asyncio.gather(*[actor.watch_signals.remote() for actor in actors])
        self._check_not_stopped(actors)
        self._processes = [(pid, Notes(folder)) for pid, folder in watched]
        # A rank on another node removes its folder itself, now: Ray kills ranks, so they cannot do it at
        # their end.
        elsewhere = [
            actor for actor, (_, notes) in zip(actors, self._processes, strict=True) if not notes.readable
        ]
        await asyncio.gather(*[actor.remove_notes.remote() for actor in elsewhere])
        # All ranks join the store of the first rank, so that has to be open before.
        host = await actors[0].__ray_call__.remote(lambda _: ray.util.get_node_ip_address())
        port = await actors[0].open_store.remote(host)
        async with self._logging_progress(actors[0]):
            await asyncio.gather(*[self._join(actors, rank, host, port) for rank in range(len(actors))])

    @asynccontextmanager
    async def _logging_progress(self, first: Any) -> AsyncIterator[None]:
        """Inside this context, log here what ``first``, the actor of the first rank, reports of its loading."""
        position = 0  # No actor starts again, so it is one of this start's.

        async def read() -> None:
            nonlocal position
            log = first.loading_log.options(concurrency_group=CONTROL)
            position, entries = await log.remote(position)
            log_entries(entry._replace(message=f"{self._name}: {entry.message}") for entry in entries)

        async def poll() -> None:
            # If the rank dies, the reason is that of its join.
            with suppress(ray.exceptions.RayError):
                while True:
                    await asyncio.sleep(_POLL_SECONDS)
                    await read()

        polling = asyncio.ensure_future(poll())
        try:
            yield
        finally:
            polling.cancel()
        await read()

    async def _join(self, actors: Sequence[Any], rank: int, host: str, port: int) -> None:
        """Let a rank load the pipeline together with the others. Raise RankDied if it dies or was stopped."""
        try:
            await actors[rank].join.remote(host, port)
        except ray.exceptions.ActorDiedError as error:
            # When one rank dies, start stops the others, and this is how they end.
            self._check_not_stopped(actors, error)
            raise RankDied(f"rank {rank} died: {self._describe_end(rank, error)}.", rank) from error

    def _check_not_stopped(self, actors: Sequence[Any], error: BaseException | None = None) -> None:
        """Raise RankDied from ``error`` if the replica was stopped since its actors were ``actors``."""
        if self.actors is not actors:
            raise RankDied("the replica was stopped.") from error

    def _describe_end(self, rank: int, error: BaseException) -> str:
        """Return how rank ``rank`` ended, such as ``"SIGKILL"``, for an error that Ray raised; and log it
        once.
        """
        pid: int | None = None
        notes: Notes | None = None
        if rank < len(self._processes):
            pid, notes = self._processes[rank]
        death = describe_death(str(error), notes)
        if rank not in self._dead:
            self._dead.add(rank)
            logger.error("%s: rank %d died: %s, process id %s", self._name, rank, death, pid)
        return death

    @property
    def process_ids(self) -> list[int]:
        return [pid for pid, _ in self._processes]

    def _end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        for _, notes in self._processes:
            notes.close()
        self._processes = []
        self._dead = set()
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def _run_batch(
        self, batch: Sequence[tuple[str, Request]], progress: Callable[[int | Output], None]
    ) -> list[Result | RequestFailed | Cancelled]:
        self._require_running()
        actors = self.actors
        # Number of partial images that were passed to progress. Polling is cancelled at the end, so the
        # answers have all of them.
        sent = 0

        async def poll() -> None:
            nonlocal sent
            reported = 0
            # The requests of a batch advance together, so the first stands for all.
            id_ = batch[0][0]
            # If the rank dies or is stopped, the answers below say so.
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                rank = actors[0].progress.options(concurrency_group=CONTROL)
                try:
                    done, previews = await rank.remote(id_, sent)
                except ray.exceptions.RayError:
                    return
                sent += len(previews)
                if done > reported:
                    progress(done)
                for preview in previews:
                    progress(preview)
                reported = done

        self._batches += 1
        polling = asyncio.ensure_future(poll())
        try:
            refs = [actor.generate_batch.remote(batch, self._batches) for actor in actors]
            answers = (await _wait_for_answers(refs))[0]
        except asyncio.CancelledError:
            # The ranks end after their step, and the next batch waits in their actors until then.
            for id_, _ in batch:
                self._cancel_running(id_)
            raise
        except RankDied as error:
            self._check_not_stopped(actors, error)
            if error.rank is None:
                logger.error("%s: %s", self._name, error)
                await self.stop()
                raise
            death = self._describe_end(error.rank, error.__cause__ or error)
            await self.stop()
            raise RankDied(f"rank {error.rank} died: {death}.", error.rank) from error
        finally:
            polling.cancel()
        progress(answers[0].steps)
        for preview in answers[0].previews[sent:]:
            progress(preview)
        # The first rank has an outcome for each request: None is for the others.
        return [answer.outcome for answer in answers if answer.outcome is not None]

    def _cancel_running(self, id_: str) -> None:
        if self.actors:
            # The answer of the first rank decides for all. It ignores a request that its batch lacks.
            self.actors[0].cancel.options(concurrency_group=CONTROL).remote(id_, self._batches)

    async def memory(self) -> Memory | None:
        self._require_running()
        memory: Memory | None = await self.actors[0].memory.remote()
        return memory

    async def alive(self) -> bool:
        if not self.running:
            return False
        actors = self.actors
        answers = await asyncio.gather(*[_ping(actor) for actor in actors], return_exceptions=True)
        errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, BaseException)}
        if actors is self.actors:  # else the replica was stopped meanwhile
            for rank, error in errors.items():
                self._describe_end(rank, error)
        return not errors


async def _ping(actor: Any) -> None:
    """Wait for an answer of a rank. Raise Ray's error if it has ended, and RankDied if it is silent for
    ``_PING_SECONDS``: the watch of a pool waits for the answers of all replicas.
    """
    try:
        await asyncio.wait_for(actor.ping.options(concurrency_group=CONTROL).remote(), _PING_SECONDS)
    except TimeoutError:
        raise RankDied(f"it gave no answer for {_PING_SECONDS:g} s") from None


async def _wait_for_answers(refs: Sequence[Any]) -> list[list[Answer]]:
    """Wait for the answers of all ranks, and return them in rank order.

    A failed or cancelled answer starts a timeout for the other ranks, because they may be waiting for that
    rank in a collective. Another answer starts none: the first rank answers later than the others, because it
    encodes the files. Raise RankDied if a rank died, or did not answer in time.
    """
    tasks: list[asyncio.Task[list[Answer]]] = [asyncio.ensure_future(ref) for ref in refs]
    pending = set(tasks)
    errors: list[Exception] = []
    grace: float | None = None
    try:
        while pending:
            if errors:
                grace = _GRACE_SECONDS
            ended, pending = await asyncio.wait(pending, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                raise RankDied(
                    f"{len(pending)} of {len(tasks)} ranks do not answer after another one ended: {errors[0]}"
                )
            for rank, task in enumerate(tasks):
                if task not in ended:
                    continue
                error = task.exception()
                if error is not None:
                    raise RankDied(f"rank {rank} died: {describe_cause(error)}", rank) from error
                errors += [x.outcome for x in task.result() if isinstance(x.outcome, Exception)]
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                # If two ranks died, only the first was raised. Asyncio reports exceptions that nobody has
                # read.
                task.exception()
    return [task.result() for task in tasks]
