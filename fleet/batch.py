"""Generation of a prompt file on several replicas. Each replica takes the next line when it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

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
    """Generate ``lines`` on ``replicas`` replicas on Ray.

    If a replica dies, it is restarted and tries its current line once more.

    Args:
        write (`Callable`): Called in this process with each line and its result.

    Returns:
        One :class:`Problem` for each line without a result.
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
    queue = iter(lines)
    problems = await asyncio.gather(*[_generate_queued(replica, queue, write) for replica in replicas])
    return sorted((problem for of_replica in problems for problem in of_replica), key=lambda problem: problem.number)


async def _generate_queued(
    replica: Replica, queue: Iterator[Line], write: Callable[[Line, Result], None]
) -> list[Problem]:
    problems: list[Problem] = []
    await replica.start()
    for line in queue:
        try:
            write(line, await _generate_with_retry(replica, line))
        except (RequestFailed, ReplicaDied) as error:
            problems.append(Problem(line.number, str(error)))
            if not replica.actors:
                await replica.restart()
    await replica.stop()
    return problems


async def _generate_with_retry(replica: Replica, line: Line) -> Result:
    try:
        return await replica.generate(line.request)
    except ReplicaDied:
        await replica.restart()
        return await replica.generate(line.request)
