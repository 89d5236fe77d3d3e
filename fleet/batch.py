"""Generation of a prompt file on several replicas. Each replica takes the next line when it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import ray

from para_core.fleet.failures import ReplicaDied, RequestFailed
from para_core.fleet.group import Replica, ReplicaShape, connect, require_cluster
from para_core.fleet.prompts import Line, Problem
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.work import Result


def generate_lines(
    lines: Sequence[Line],
    recipe: Recipe,
    shape: ReplicaShape,
    replicas: int,
    *,
    format_: str,
    fps: int,
    write: Callable[[Line, Result], None],
    debug: bool = False,
) -> list[Problem]:
    """Generate ``lines`` on ``replicas`` replicas on Ray, and return a :class:`Problem` for each line without a result.

    ``write`` is called in this process with each line and its result. A replica that dies is restarted, and tries its
    current line once more.
    """
    connected = connect(shape.ranks * replicas, debug=debug)
    try:
        require_cluster(shape, replicas)
        options = ReplicaOptions(format_, fps)
        fleet = [Replica(recipe, shape, options) for _ in range(min(replicas, len(lines)))]
        return asyncio.run(_generate_all(lines, fleet, write))
    finally:
        if connected:
            ray.shutdown()


async def _generate_all(
    lines: Sequence[Line], replicas: Sequence[Replica], write: Callable[[Line, Result], None]
) -> list[Problem]:
    queue, problems = iter(lines), list[Problem]()

    async def generate_queued(replica: Replica) -> None:
        await replica.start()
        for line in queue:
            try:
                try:
                    result = await replica.generate(line.request)
                except ReplicaDied:
                    await replica.restart()
                    result = await replica.generate(line.request)
                write(line, result)
            except (RequestFailed, ReplicaDied) as error:
                problems.append(Problem(line.number, str(error)))
                if not replica.actors:
                    await replica.restart()
        await replica.stop()

    await asyncio.gather(*map(generate_queued, replicas))
    return sorted(problems, key=lambda problem: problem.number)
