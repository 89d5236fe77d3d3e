"""Processes of the ranks on this host: how they are started, watched and ended.

``handle.py`` starts and ends a :class:`RankGroup`, and ``running_call.py`` reads its messages. ``hosts.py``
makes one of processes that agents on other hosts started with this file, and ``fleet/engine.py`` asks whether
a rank has died. Tests: tests/launcher/test_life.py, tests/launcher/test_failures.py.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Protocol

from para_core.launcher.wire import Body, Channel

# A rank has the caller's search path before it imports anything.
_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
_MAIN = "from para_core.launcher.rank import main_of_child; main_of_child(*map(int, sys.argv[1:]))"
# Environment variables by which torchrun, Slurm and MPI tell a process its rank: their names, and prefixes if
# a launcher sets many.
_LAUNCHER_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_")
# Tells a process that it is a rank.
IN_RANK = "PARA_CORE_LAUNCHED_RANK"
# Bytes of a rank's output that are shown if it dies.
_TAIL = 2000
# Seconds in which a rank that was told to close ends by itself.
_CLOSING = 5.0
# Seconds in which a process ends after its connection, which the system closes first.
_ENDING = 2.0


class RankProcess(Protocol):
    """The process of one rank, which a :class:`RankGroup` ends."""

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, at most ``seconds``. Return whether it has."""

    def kill(self) -> None:
        """End the process, and those that it started, at once.

        Call :meth:`describe_end` before: this method closes the file with the last output, and a living
        process then counts as ended by SIGKILL.
        """

    def describe_end(self) -> str:
        """Return how the process ended: a clause after its rank's name, and its last output, if that was not shown.

        After :meth:`kill` this is how that method ended it.
        """


class LocalProcess:
    """A rank's process on this host.
    ``output`` is the file with its output, None if it writes to the caller's.
    """

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes] | None) -> None:
        self._process, self._output = process, output
        self._killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0.0))
        return self._process.returncode is not None

    def kill(self) -> None:
        if not self._killed:
            try:
                # The rank leads a session, in which are the processes that it started, such as compile
                # workers. They may outlive it, so the signal is sent also if wait() has seen its end. As long
                # as one of them lives, the system gives the number to no other process. If none does, it
                # could, but only after all other numbers.
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                # macOS refuses the signal if the group has zombies only.
                self._process.kill()
            # Never send the signal twice: now that the group is empty, its number becomes free.
            self._killed = True
        self._process.wait()
        if self._output is not None:
            self._output.close()

    def describe_end(self) -> str:
        if not self.wait(_ENDING):
            return "closed its connection"
        code = self._process.returncode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {_signal_name(-code)}"
        if code == -signal.SIGKILL and not self._killed:
            how += ", most likely because the machine ran out of memory"
        tail = self._tail()
        return f"{how}. Its last output:\n{tail}\n" if tail else f"{how}."

    def _tail(self) -> str:
        if self._output is None or self._output.closed:
            return ""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL))
        return self._output.read().decode(errors="replace").strip()


def _signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGKILL"``. Python has no names for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankGroup:
    """The ranks of one start: their processes, their channels, and the messages that came from them.

    It has no reference to the handle: the finalizer of the handle refers to this object, and ends the ranks
    when the handle is garbage. A group that never got a handle ends when it is garbage itself.
    """

    def __init__(
        self, members: Sequence[RankProcess], channels: Sequence[Channel], host: str = "127.0.0.1"
    ) -> None:
        self.members, self.channels, self.host = members, channels, host
        self.inbox = queue.SimpleQueue[tuple[tuple[Any, ...], Body]]()
        self.ended = False
        # A process that this one forks has the group too, but does not own it.
        self.owner = os.getpid()
        for rank, channel in enumerate(channels):
            threading.Thread(target=_receive_messages, args=(rank, channel, self.inbox), daemon=True).start()

    def send(self, *head: Any, body: Body | None = None) -> None:
        """Send a message to all ranks."""
        for channel in self.channels:
            with suppress(OSError):  # The thread that receives reports a rank that has ended.
                channel.send(head, body)

    def end(self, *, idle: bool) -> None:
        """End all ranks. Those that are ``idle`` are told to, and get some seconds for it.

        ``ended`` is set at the beginning, so that calls fail at once. A second call meanwhile, in another
        thread, returns before the processes have ended.
        """
        if self.ended or os.getpid() != self.owner:
            return
        self.ended = True
        try:
            if idle:
                self.send("close")
                deadline = time.monotonic() + _CLOSING
                for member in self.members:
                    member.wait(deadline - time.monotonic())
        finally:
            self._kill()
        for channel in self.channels:
            channel.end()
        # Wake a call that waits for these ranks in another thread.
        self.inbox.put((("ended",), Body(b"")))

    def __del__(self) -> None:
        self.end(idle=False)

    def _kill(self) -> None:
        """End all processes, also if Ctrl-C is pressed meanwhile, which is raised afterwards."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                for member in self.members:
                    member.kill()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted


def _receive_messages(
    rank: int, channel: Channel, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Body]]
) -> None:
    """Put the messages of a rank into ``inbox`` until it ends, and then the message ``("died", rank)``.

    A message that cannot be read, such as one whose head is no pickle, also counts as the end of the rank.
    Python prints that error as one of this thread.
    """
    try:
        while True:
            inbox.put(channel.receive())
    except EOFError:
        pass
    finally:
        # Without this message a call would wait for the rank until its time-out.
        channel.close()
        inbox.put((("died", rank), Body(b"")))


def is_set_by_launcher(name: str) -> bool:
    """Whether a launcher sets the environment variable ``name`` to tell a process its rank. A process that
    this one starts has another rank, so it must not inherit the variable.
    """
    return name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)


def rank_environment(
    rank: int, ranks: int, local_rank: int, local_ranks: int, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a rank: this process's without the variables of other launchers, with
    ``RANK``, ``WORLD_SIZE`` and those of this host as torchrun sets them, and with ``env``, whose variables
    replace those of the same names. Each host has ``local_ranks`` ranks.
    """
    inherited = {name: value for name, value in os.environ.items() if not is_set_by_launcher(name)}
    launcher = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "GROUP_RANK": str(rank // local_ranks),
        "GROUP_WORLD_SIZE": str(ranks // local_ranks),
        IN_RANK: "1",
        # The caller draws the progress bar.
        "TQDM_DISABLE": "1",
    }
    if local_ranks > 1 and "OMP_NUM_THREADS" not in inherited:
        launcher["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks share the CPU cores
    return {**inherited, **launcher, **env}


def start_local_ranks(
    ranks: int, devices: Sequence[int | str] | None, env: Mapping[str, str], folder: Path | None = None
) -> RankGroup:
    """Start ``ranks`` processes on this host, in ``folder`` or in this process's.

    They see ``devices``, by default all that this process sees. ``CUDA_VISIBLE_DEVICES`` in ``env`` counts
    more than ``devices``.

    Raises:
        RuntimeError: This system has no Unix sockets, or the Python interpreter is unknown.
        ValueError: ``CUDA_VISIBLE_DEVICES`` of this process names fewer GPUs than a number of ``devices``
            needs. If it is not set, CUDA raises in the ranks. Or ``devices`` name a GPU twice.
    """
    if not hasattr(socket, "send_fds"):
        raise RuntimeError("launch needs Unix sockets: Linux or macOS.")
    if not sys.executable:
        raise RuntimeError(
            "launch starts Python processes, but sys.executable is empty: set it to a Python interpreter."
        )
    members, channels = list[RankProcess](), list[Channel]()
    visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(_visible_names(devices))}
    try:
        for rank in range(ranks):
            ours, theirs = socket.socketpair()
            channels.append(Channel(ours))
            environment = rank_environment(rank, ranks, rank, ranks, {**visible, **env})
            with theirs:
                arguments = [str(theirs.fileno()), str(rank), str(ranks)]
                members.append(
                    start_process(
                        _MAIN,
                        arguments,
                        environment,
                        shown=rank == 0,
                        pass_fds=[theirs.fileno()],
                        folder=folder,
                    )
                )
        return RankGroup(members, channels)
    except BaseException:
        for member in members:
            member.kill()
        # A process that is not among the members yet ends itself, because its connection ends.
        for channel in channels:
            channel.close()
        raise


def start_process(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    shown: bool,
    pass_fds: Sequence[int] = (),
    folder: Path | None = None,
) -> LocalProcess:
    """Start a Python process that runs ``program`` with the search path of this one, in ``folder`` or here.

    ``shown`` is whether it writes to this process's output. The first rank does; what all ranks print would
    come several times.
    """
    output = None if shown else tempfile.TemporaryFile()  # noqa: SIM115 (closed by LocalProcess.kill)
    options = [f"-W{option}" for option in sys.warnoptions]
    # Python itself ignores entries that are no strings, such as a Path that a script has inserted.
    search_path = json.dumps(
        [path or str(folder or Path.cwd()) for path in sys.path if isinstance(path, str)]
    )
    process = subprocess.Popen(
        [sys.executable, *options, "-c", _PATH + program, *arguments, search_path],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=pass_fds,
        # A terminal's or Jupyter's Ctrl-C then reaches the caller only.
        start_new_session=True,
    )
    return LocalProcess(process, output)


def _visible_names(devices: Sequence[int | str]) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for ``devices``, whose numbers count what this process sees.

    Raise ValueError if a number is too large for the variable, which hides all GPUs if it is empty, or if two
    entries are equal.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(device).strip() for device in devices]
    if visible is not None:
        # CUDA ignores the first entry that is no GPU, and all after it. -1 is the usual one.
        entries = list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(","))))
        for index, device in enumerate(devices):
            if isinstance(device, int) and device >= len(entries):
                raise ValueError(
                    f"devices={list(devices)}, and CUDA_VISIBLE_DEVICES={visible!r} has {len(entries)} of them."
                )
            if isinstance(device, int):
                names[index] = entries[device]
    for name in names:
        # NCCL takes one rank per GPU.
        if names.count(name) > 1:
            raise ValueError(
                f"devices={list(devices)} has GPU {name} more than once; expected one for each rank."
            )
    return names
