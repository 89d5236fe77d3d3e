"""A replica: ranks as Ray actors in one placement group, which answer requests together, and are made again when one dies."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestFailed
from para_core.fleet.foresee import Memory
from para_core.fleet.rank import CONTROL, Answer, Rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.work import Result
from para_core.foreign_errors import is_slow_start_of_ray

# Between looks at how many steps are done.
_LOOK_SECONDS = 0.1
# Ray gives a node half a minute to start, which a machine that does anything else may take.
_STARTS = 4
# How long ranks that have not answered may take after another rank failed or was cancelled: they are at most a step behind it.
_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class ReplicaShape:
    """What a replica takes of a cluster.

    Args:
        ranks: how many; each has a GPU where the cluster has some, else a CPU.
        spread: ranks may be on several nodes; otherwise all are on one.
    """

    ranks: int
    spread: bool = False


class Replica:
    """A group of ranks that holds one pipeline. One request at a time; :meth:`generate` waits for its turn."""

    def __init__(self, recipe: Recipe, shape: ReplicaShape, *, format_: str, fps: int) -> None:
        self._recipe, self._shape = recipe, shape
        self._format, self._fps = format_, fps
        self._placement: Any = None
        self._turn = asyncio.Lock()
        self.actors: Sequence[Any] = ()
        self.mesh: dict[str, int] = {}

    async def start(self) -> None:
        """Place the ranks, and load the pipeline on them.

        Raises:
            ValueError: the cluster is too small for it.
            RuntimeError: the pipeline cannot be loaded.
        """
        bundle = _bundle()
        strategy = "PACK" if self._shape.spread else "STRICT_PACK"
        self._placement = placement_group([bundle] * self._shape.ranks, strategy=strategy)
        await self._placed()
        self.actors = [self._actor(rank, bundle) for rank in range(self._shape.ranks)]
        try:
            host = await self.actors[0].__ray_call__.remote(lambda _: ray.util.get_node_ip_address())
            port = await self.actors[0].open_store.remote(host)
            self.mesh = (await asyncio.gather(*[actor.join.remote(host, port) for actor in self.actors]))[0]
        except ray.exceptions.RayError as error:
            await self.stop()
            raise RuntimeError(cause(error)) from error

    async def _placed(self) -> None:
        seconds = self._recipe.timeout
        try:
            await asyncio.wait_for(_await(self._placement.ready()), seconds)
        except TimeoutError:
            await self.stop()
            raise RuntimeError(
                f"no room for a replica of {self._shape.ranks} ranks within {seconds:g} s: what the Ray cluster has is in use."
            ) from None

    def _actor(self, rank: int, bundle: dict[str, float]) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
        actor = ray.remote(concurrency_groups={CONTROL: 4})(Rank).options(
            scheduling_strategy=strategy,
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
        )
        return actor.remote(self._recipe, rank, self._shape.ranks, self._format, self._fps)

    async def stop(self) -> None:
        """End all ranks, whatever they do."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = ()
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def restart(self) -> float:
        """Tear the replica down and make it again; seconds that took."""
        start = time.perf_counter()
        await self.stop()
        await self.start()
        return time.perf_counter() - start

    async def generate(
        self, request: Request, *, id_: str | None = None, progress: Callable[[int], None] | None = None
    ) -> Result:
        """The result of one request.

        Args:
            id_: by which :func:`cancel` knows it.
            progress: takes the number of steps done, each time it was looked at and had changed, and in the end.

        Raises:
            RequestFailed, RequestCancelled, ReplicaDied.
        """
        id_ = id_ or uuid.uuid4().hex
        async with self._turn:
            if not self.actors:
                raise ReplicaDied("the replica is not running.")
            looking = asyncio.ensure_future(self._look(id_, progress)) if progress is not None else None
            try:
                answers = await _answers([actor.generate.remote(id_, request) for actor in self.actors])
            except ReplicaDied:
                await self.stop()
                raise
            finally:
                if looking is not None:
                    looking.cancel()
        first = answers[0]
        if progress is not None:
            progress(first.steps)
        if first.kind == "cancelled":
            raise RequestCancelled(first.reason)
        if first.result is None:
            raise RequestFailed(first.reason)
        return first.result

    async def memory(self, room: float | None) -> Memory | None:
        """What results take of a rank's memory, of which there are ``room`` bytes, or as many as its device has; None: not known."""
        memory: Memory | None = await self.actors[0].memory.remote(self.mesh, room)
        return memory

    async def _look(self, id_: str, progress: Callable[[int], None]) -> None:
        seen = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            done = await self.actors[0].steps_done.options(concurrency_group=CONTROL).remote(id_)
            if done > seen:
                seen = done
                progress(done)


def cancel(first_rank: Any, id_: str) -> Any:
    """End a request after the step that is running on the replica of ``first_rank``; a reference to wait for."""
    return first_rank.cancel.options(concurrency_group=CONTROL).remote(id_)


def require_cluster(shape: ReplicaShape, replicas: int) -> None:
    """Raise ``ValueError`` unless the cluster that this process is connected to has room for that many replicas."""
    bundle, has = _bundle(), ray.cluster_resources()
    for kind, each in bundle.items():
        needed = each * shape.ranks * replicas
        if needed > has.get(kind, 0):
            raise ValueError(
                f"{replicas} replicas of {shape.ranks} ranks need {needed:g} {kind}s, and the Ray cluster has "
                f"{has.get(kind, 0):g}: take fewer (--replicas, --ranks), or add nodes with ray start."
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(min(int(node.get(kind, 0) // (each * shape.ranks)) for kind, each in bundle.items()) for node in nodes)
    if not shape.spread and fit < replicas:
        kind = next(reversed(bundle))
        raise ValueError(
            f"{replicas} replicas of {shape.ranks} ranks, each on one node, and the nodes of the Ray cluster have "
            f"{', '.join(f'{node.get(kind, 0):g}' for node in nodes)} {kind}s: take fewer ranks (--ranks), or serve --spread, "
            "which takes the ranks of a replica from several nodes."
        )


def connect(cpus: int, *, debug: bool) -> bool:
    """To the cluster that ``ray start`` made or ``RAY_ADDRESS`` names, or else to a new one on this machine that has at least so many CPUs.

    Not to one that another program made for itself, which ends with it: Ray's ``address="auto"`` would take any.

    Returns:
        Whether this process was not connected before.

    Raises:
        RuntimeError: Ray does not start.
    """
    if ray.is_initialized():
        return False
    # Ray's own default is 15: ranks that wait for one another would come last on a machine that does anything else.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {} if debug else {"logging_level": "ERROR", "log_to_driver": False}
    here = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False, **options}
    try:
        _start(**here)
    except ValueError:  # there is a cluster, and its CPUs are not ours to say
        try:
            ray.init(**options)
        except ConnectionError as error:
            named = os.environ.get("RAY_ADDRESS")
            if named:
                raise RuntimeError(f"RAY_ADDRESS is {named!r}, and no Ray cluster answers there.") from error
            # What ray start noted, of a cluster that did not end by ray stop.
            _start(address="local", **here)
    return True


def _start(**options: Any) -> None:
    """A cluster of this machine; raises ``ValueError`` where there is one."""
    for left in range(_STARTS - 1, -1, -1):
        try:
            ray.init(**options)
            return
        except ValueError:
            raise
        except Exception as error:
            # A node that was too slow is a bare Exception of Ray's.
            if left == 0 or not is_slow_start_of_ray(error):
                raise RuntimeError(f"Ray does not start on this machine: {cause(error)}") from error
            ray.shutdown()


def _bundle() -> dict[str, float]:
    return {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU", 0) else {"CPU": 1.0}


async def _answers(refs: Sequence[Any]) -> list[Answer]:
    """Wait for the answers of all ranks; return them in rank order.

    Ranks that are done may answer long before the first one, which encodes the result. So only an answer that is not *done* limits
    the time of the others: they may wait in a collective for the rank that gave it.

    Raises:
        ReplicaDied: a rank died, or some ranks gave no answer after another rank had failed or was cancelled.
    """
    tasks: list[asyncio.Task[Answer]] = [asyncio.ensure_future(_await(ref)) for ref in refs]
    pending = set(tasks)
    answered: list[Answer] = []
    try:
        while pending:
            grace = _GRACE_SECONDS if any(answer.kind != "done" for answer in answered) else None
            ended, pending = await asyncio.wait(pending, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                reason = next((answer.reason for answer in answered if answer.reason), "no reason given")
                raise ReplicaDied(
                    f"{len(pending)} of {len(tasks)} ranks no longer answer, after another ended with: {reason}"
                )
            for rank, task in enumerate(tasks):
                if task not in ended:
                    continue
                error = task.exception()
                if error is not None:
                    raise ReplicaDied(f"rank {rank} died: {cause(error)}") from error
                answered.append(task.result())
    finally:
        for task in pending:
            task.cancel()
    return [task.result() for task in tasks]


async def _await(ref: Any) -> Any:
    return await ref


def cause(error: BaseException) -> str:
    """The first line that says something of what Ray raised."""
    cause = getattr(error, "cause", None)
    text = str(cause if cause is not None else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
