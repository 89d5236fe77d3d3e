"""Many prompts over the replicas of a fleet: each takes the next line as soon as it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import ray

from para_core.fleet.failures import ReplicaDied, RequestFailed
from para_core.fleet.group import Replica, ReplicaShape, connect, require_cluster
from para_core.fleet.prompts import Line, Problem
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
    """Generate ``lines`` on so many replicas on Ray; ``write`` takes each result here, in this process.

    A replica that dies is made again, and its line is tried once more.

    Returns:
        Why lines have no result.
    """
    connected = connect(shape.ranks * replicas, debug=debug)
    try:
        require_cluster(shape, replicas)
        makers = [Replica(recipe, shape, format_=format_, fps=fps) for _ in range(min(replicas, len(lines)))]
        return asyncio.run(_spread(lines, makers, write))
    finally:
        if connected:
            ray.shutdown()


async def _spread(
    lines: Sequence[Line], replicas: Sequence[Replica], write: Callable[[Line, Result], None]
) -> list[Problem]:
    waiting = iter(lines)
    found = await asyncio.gather(*[_work(replica, waiting, write) for replica in replicas])
    return sorted((problem for problems in found for problem in problems), key=lambda problem: problem.number)


async def _work(replica: Replica, waiting: Iterator[Line], write: Callable[[Line, Result], None]) -> list[Problem]:
    problems: list[Problem] = []
    await replica.start()
    for line in waiting:
        try:
            write(line, await _try_twice(replica, line))
        except (RequestFailed, ReplicaDied) as error:
            problems.append(Problem(line.number, str(error)))
            if not replica.actors:
                await replica.restart()
    await replica.stop()
    return problems


async def _try_twice(replica: Replica, line: Line) -> Result:
    try:
        return await replica.generate(line.request)
    except ReplicaDied:
        await replica.restart()
        return await replica.generate(line.request)
