"""Ranks on several hosts of a Ray cluster. Ray starts one agent per host; the ranks connect to the caller by
TCP.

Messages are pickles and travel in the clear, so the hosts must trust the network. A rank first proves by a
secret, which its agent got from the caller, that the caller may load its pickles.

Only ``launch(hosts=...)`` comes here; without it ranks start in ``processes.py``. Tests: tests/launcher/test_hosts.py.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from para_core.launcher.interrupts import keep_sigterm_handler
from para_core.launcher.processes import (
    LocalProcess,
    RankGroup,
    RankProcess,
    rank_environment,
    start_process,
)
from para_core.launcher.wire import Channel

_MAIN = "from para_core.launcher.hosts import main_of_remote; main_of_remote(sys.argv)"
# Bytes of the secret that a rank sends first. The caller loads pickles only from ranks that have it.
_SECRET = 32
# Environment variable by which a rank gets the secret: unlike its arguments, other users of its host cannot
# read it.
_SECRET_NAME = "PARA_CORE_LAUNCH_SECRET"
# Bytes of the number of a rank, which follows.
_NUMBER = 4
# Seconds between two checks that the ranks that have not connected yet live.
_CHECK_SECONDS = 2.0


class HostAgent:
    """A Ray actor that starts and ends the processes of the ranks on one host."""

    def __init__(self) -> None:
        self._processes: dict[int, LocalProcess] = {}

    def address(self) -> str:
        """Return the address at which other hosts reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(
        self,
        first: int,
        count: int,
        ranks: int,
        caller: tuple[str, int],
        secret: bytes,
        env: Mapping[str, str],
    ) -> None:
        """Start the ranks ``first`` to ``first + count - 1``. They connect to the caller."""
        for local_rank in range(count):
            rank = first + local_rank
            arguments = [caller[0], str(caller[1]), str(rank), str(ranks)]
            environment = rank_environment(rank, ranks, local_rank, count, env)
            environment[_SECRET_NAME] = secret.hex()
            self._processes[rank] = start_process(_MAIN, arguments, environment, shown=rank == 0)

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """Return what a method of the rank's :class:`LocalProcess` returns."""
        return getattr(self._processes[rank], method)(*args)


class RemoteProcess:
    """A rank's process on another host, which its agent ends."""

    def __init__(self, agent: Any, rank: int) -> None:
        self._agent, self._rank = agent, rank

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, at most ``seconds``.
        Return whether it has; also if its host is lost.
        """
        seconds = max(seconds, 0.0)
        return bool(self._ask("wait", seconds, seconds=seconds, otherwise=True))

    def kill(self) -> None:
        """End the process, unless its host is lost."""
        self._ask("kill", otherwise=None)

    def describe_end(self) -> str:
        """Return how the process ended."""
        return str(self._ask("describe_end", otherwise="was lost with its host."))

    def _ask(self, method: str, *args: Any, seconds: float = 0.0, otherwise: Any) -> Any:
        """Return the answer of the agent, which may wait for ``seconds`` first; ``otherwise`` if its host is
        lost, or it does not answer within 30 s more. An exception of the agent's method is raised here.
        """
        import ray

        try:
            return ray.get(self._agent.ask.remote(self._rank, method, *args), timeout=seconds + 30.0)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:
            return otherwise


class _HostsGroup(RankGroup):
    """Ranks on several hosts. Their end releases the resources that they took in the cluster."""

    def __init__(self, agents: Sequence[Any], placement: Any, *args: Any, **kwargs: Any) -> None:
        self._agents, self._placement = agents, placement
        super().__init__(*args, **kwargs)

    def _kill(self) -> None:
        """End all ranks and agents. Only the process that owns the group comes here, and once."""
        import ray

        try:
            super()._kill()
        finally:
            if ray.is_initialized():
                for agent in self._agents:
                    ray.kill(agent)
                ray.util.remove_placement_group(self._placement)


def start_ranks_on_hosts(ranks: int, hosts: int, timeout: float, env: Mapping[str, str]) -> RankGroup:
    """Start ``ranks`` processes, as many on each of ``hosts`` hosts of the Ray cluster. ``hosts`` divides
    ``ranks``.

    Raises:
        RuntimeError: There is no cluster, it has too few hosts, or no free resources within ``timeout``
            seconds, an agent does not start, or a rank ends, or does not connect within them.
    """
    ray = connect_to_ray()
    end = time.monotonic() + timeout
    per_host = ranks // hosts
    bundle: dict[str, float] = {"CPU": per_host}
    # A rank selects a GPU if its host has any (process_group.py), so it must reserve one, or another program
    # of the cluster may get the same. Which hosts Ray will choose, and whether the ranks will then compute on
    # the CPU, is not known here: ranks for the CPU need a cluster without GPUs.
    if ray.cluster_resources().get("GPU", 0):
        bundle["GPU"] = per_host
    needed = " and ".join(f"{count} {kind}s" for kind, count in bundle.items())
    fitting = _count_nodes_with(ray, bundle)
    if fitting < hosts:
        raise RuntimeError(
            f"the Ray cluster has no {hosts} hosts with {needed} each, only {fitting}. Start more nodes with ray "
            "start, or use fewer ranks or hosts."
        )
    placement = ray.util.placement_group(
        [bundle] * hosts, strategy="STRICT_SPREAD" if hosts > 1 else "STRICT_PACK"
    )
    agents = list[Any]()
    try:
        if not placement.wait(timeout):
            raise RuntimeError(
                f"other programs use the hosts of the Ray cluster: waited {timeout:g} s for {hosts} hosts with "
                f"{needed} free each. Start more nodes with ray start, or use fewer ranks or hosts."
            )
        # One at a time, so that those before one that raises are ended below.
        for host_index in range(hosts):
            agents.append(_start_agent(ray, placement, host_index, bundle))
        members, channels, host = _start_ranks(ray, agents, per_host, env, timeout, end)
        return _HostsGroup(agents, placement, members, channels, host)
    except BaseException:
        # The ranks that agents have started end by themselves, because they lose their parent
        # (connection.py).
        for agent in agents:
            ray.kill(agent)
        ray.util.remove_placement_group(placement)
        raise


def _start_ranks(
    ray: Any, agents: Sequence[Any], per_host: int, env: Mapping[str, str], timeout: float, end: float
) -> tuple[list[RankProcess], list[Channel], str]:
    """Let each agent start ``per_host`` ranks, and return these, their channels, and the address of the first host.

    Raise RuntimeError if one does not start or connect within ``timeout`` seconds, which are over at ``end``.
    """
    ranks, secret = per_host * len(agents), secrets.token_bytes(_SECRET)
    with socket.create_server(("", 0)) as server:
        caller = ray.util.get_node_ip_address(), server.getsockname()[1]
        starts = [
            agent.start.remote(index * per_host, per_host, ranks, caller, secret, dict(env))
            for index, agent in enumerate(agents)
        ]
        try:
            ray.get(starts, timeout=max(0.0, end - time.monotonic()))
            host: str = ray.get(agents[0].address.remote(), timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"the ranks did not start on all hosts within {timeout:g} s: para_core must be installed on every "
                f"host. The cause is Ray's {type(error).__name__}."
            ) from error
        members: list[RankProcess] = [RemoteProcess(agents[rank // per_host], rank) for rank in range(ranks)]
        return members, _accept_ranks(server, members, secret, end - time.monotonic()), host


def connect_to_ray() -> Any:
    """Connect to the running Ray cluster, and return Ray.

    Unlike ``connect`` in ``fleet/ray_cluster.py`` it starts no cluster if there is none.

    Raises:
        RuntimeError: Ray is not installed, there is no running cluster, or ``RAY_ADDRESS`` is invalid.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise RuntimeError("hosts= starts ranks by Ray, which is not installed: pip install ray.") from None
    if not ray.is_initialized():
        try:
            with keep_sigterm_handler():
                ray.init(address="auto", logging_level="ERROR")
        except ConnectionError:
            raise RuntimeError(
                "hosts= needs a running Ray cluster: run ray start --head on one host, and ray start "
                "--address=HOST:6379 on each other host."
            ) from None
        except ValueError as error:
            raise RuntimeError(
                f"RAY_ADDRESS is {os.environ.get('RAY_ADDRESS')!r}, and Ray refuses it: {error}. Expected HOST:PORT."
            ) from error
    return ray


def _count_nodes_with(ray: Any, bundle: Mapping[str, float]) -> int:
    """Return how many living nodes of the Ray cluster have the resources of ``bundle``, free or not."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(node.get(kind, 0) >= count for kind, count in bundle.items()) for node in nodes)


def _start_agent(ray: Any, placement: Any, host: int, bundle: Mapping[str, float]) -> Any:
    """Return a :class:`HostAgent` that Ray starts in bundle ``host`` of ``placement``, with the bundle's resources."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement, placement_group_bundle_index=host
    )
    options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
    # The agent answers while another thread of it waits for a process: a call may ask it while the ranks are
    # ended.
    return ray.remote(HostAgent).options(max_concurrency=16, **options).remote()


def _accept_ranks(
    server: socket.socket, members: Sequence[RankProcess], secret: bytes, timeout: float
) -> list[Channel]:
    """Return the channels of all ranks, in rank order. Connections without the secret are closed.

    Raise RuntimeError if a rank ends before it connects, or does not connect within ``timeout`` seconds. The
    connections are closed then.
    """
    channels: dict[int, Channel] = {}
    end = time.monotonic() + timeout
    try:
        while len(channels) < len(members):
            missing = [rank for rank in range(len(members)) if rank not in channels]
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise RuntimeError(
                    f"ranks {missing} did not connect in time: para_core must be installed on every host, and the "
                    "hosts must reach this one."
                )
            server.settimeout(min(_CHECK_SECONDS, remaining))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                # A rank that cannot import para_core ends at once.
                for rank in missing:
                    if members[rank].wait(0.0):
                        raise RuntimeError(f"rank {rank} {members[rank].describe_end()}") from None
                continue
            number = _receive_greeting(connection, secret)
            if number is None:
                connection.close()
            else:
                channels[number] = _channel_over(connection)
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return [channels[rank] for rank in range(len(members))]


def _receive_greeting(connection: socket.socket, secret: bytes) -> int | None:
    """Return the number of the rank that has opened ``connection``; None if it does not send the secret."""
    # A stranger that sends nothing, or byte after byte, holds up the ranks for 10 s. Others may follow it,
    # each for 10 s, until the time-out of the start.
    deadline = time.monotonic() + 10.0
    connection.settimeout(10.0)
    greeting = b""
    with suppress(OSError):
        # A socket with a timeout ignores MSG_WAITALL, so the parts are received one after the other.
        while part := connection.recv(_SECRET + _NUMBER - len(greeting)):
            greeting += part
            connection.settimeout(max(0.0, deadline - time.monotonic()))
    if len(greeting) != _SECRET + _NUMBER or not hmac.compare_digest(greeting[:_SECRET], secret):
        return None
    connection.settimeout(None)
    return int.from_bytes(greeting[_SECRET:])


def _channel_over(connection: socket.socket) -> Channel:
    """Return a channel over a TCP ``connection``. Both ends make theirs here.

    A channel sends a small message in two parts. Without TCP_NODELAY the second part waits until the other
    end has acknowledged the first, which takes some 40 ms.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection)


def main_of_remote(arguments: Sequence[str]) -> None:
    """Run a rank that an agent started. ``arguments``, those of :meth:`HostAgent.start`, follow the name of
    the program.
    """
    from para_core.launcher.rank import main

    _, host, port, rank, ranks = arguments
    # Removed, so that processes that the rank starts do not inherit it.
    secret = bytes.fromhex(os.environ.pop(_SECRET_NAME))
    connection = socket.create_connection((host, int(port)))
    connection.sendall(secret + int(rank).to_bytes(_NUMBER))
    main(_channel_over(connection), int(rank), int(ranks))
