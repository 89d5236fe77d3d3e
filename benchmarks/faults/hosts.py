"""Several hosts on one machine: each is a network namespace, and veth links and a bridge join them.

Needs Linux and root. If namespaces are not allowed, the hosts are loopback addresses, ``hosts.namespaces`` says so, and
links can be neither cut nor disturbed. A process between two bridges adds delay and loss (:func:`carry`), because not
every kernel has ``tc``'s netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_PREFIX = "para-core"
_CLONE_NEWNET = 0x40000000


class NotAllowed(RuntimeError):
    """The error if this machine does not allow network namespaces. The message gives the reason."""


def _ip(*arguments: str, namespace: str | None = None) -> str:
    command = ["ip", *([] if namespace is None else ["-n", namespace]), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Hosts:
    """Hosts, each with an address that the others reach, and the interface of this address."""

    num_hosts: int
    namespaces: bool
    name: str = field(default_factory=lambda: f"{_PREFIX}-{os.getpid()}")
    _wires: dict[int, subprocess.Popen[str]] = field(default_factory=dict, repr=False)
    _cut: set[int] = field(default_factory=set, repr=False)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}" if self.namespaces else f"127.0.0.{host + 1}"

    @property
    def interface(self) -> str:
        return "eth0" if self.namespaces else "lo"

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def start(
        self, host: int, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Run ``command`` on ``host`` in its own process group. ``options`` are Popen's."""
        inside = ["ip", "netns", "exec", self.namespace(host)] if self.namespaces else []
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(environment or {})}
        return subprocess.Popen([*inside, *command], env=variables, text=True, start_new_session=True, **options)

    def enter(self, host: int) -> None:
        """Move this process, which must have one thread, to ``host``."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if not self.namespaces:
            return
        with Path(f"/run/netns/{self.namespace(host)}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace(host)}")

    # -- Links.

    def disturb(self, host: int, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """Delay each packet to and from ``host`` by ``delay`` seconds, and drop it with probability ``loss``."""
        self._require_namespaces("disturbed")
        self.heal(host)
        aside, taps = f"aside{host}", (f"near{host}", f"far{host}")
        command = [sys.executable, __file__, *taps, str(delay), str(loss)]
        wire = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._wires[host] = wire
        output: IO[str] | None = wire.stdout
        if output is None or output.readline() != "ready\n":
            raise RuntimeError("the process of the slow link did not start")
        _ip("link", "add", aside, "type", "bridge", namespace=self._switch)
        for device, master in ((taps[0], aside), (taps[1], "bridge"), (f"port{host}", aside)):
            _ip("link", "set", device, "master", master, "up", namespace=self._switch)
        _ip("link", "set", aside, "up", namespace=self._switch)

    def cut(self, host: int) -> None:
        """Cut the link of ``host`` without telling it or its peers."""
        self._require_namespaces("cut")
        _ip("link", "set", f"port{host}", "nomaster", namespace=self._switch)
        self._cut.add(host)

    def heal(self, host: int) -> None:
        """Undo :meth:`cut` and :meth:`disturb`."""
        wire = self._wires.pop(host, None)
        if wire is not None:
            _end(wire)
            _ip("link", "del", f"aside{host}", namespace=self._switch)
        if wire is not None or host in self._cut:
            _ip("link", "set", f"port{host}", "master", "bridge", namespace=self._switch)
            self._cut.discard(host)

    def _require_namespaces(self, verb: str) -> None:
        if not self.namespaces:
            raise NotAllowed(f"the link of a loopback address cannot be {verb}: that takes network namespaces.")

    # -- Making and removing.

    def make(self) -> None:
        """Create namespaces, links and the bridge.

        Raises:
            NotAllowed: There is no root or no ``ip``, or the kernel refuses.
        """
        if shutil.which("ip") is None:
            raise NotAllowed("`ip` is not installed (Debian's iproute2).")
        try:
            self._make()
        except RuntimeError as error:
            self.remove()
            raise NotAllowed(str(error)) from error

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("link", "add", "bridge", "type", "bridge", namespace=self._switch)
        _ip("link", "set", "bridge", "up", namespace=self._switch)
        for host in range(self.num_hosts):
            namespace = self.namespace(host)
            _ip("netns", "add", namespace)
            peer = ["peer", "name", "eth0", "netns", namespace]
            _ip("link", "add", f"port{host}", "type", "veth", *peer, namespace=self._switch)
            _ip("link", "set", f"port{host}", "master", "bridge", "up", namespace=self._switch)
            _ip("addr", "add", f"{self.address(host)}/24", "dev", "eth0", namespace=namespace)
            for device in ("lo", "eth0"):
                _ip("link", "set", device, "up", namespace=namespace)

    def remove(self) -> None:
        """End the processes that still run on the hosts, and remove the hosts."""
        for wire in self._wires.values():
            _end(wire)
        self._wires.clear()
        for namespace in _known_namespaces():
            if namespace.startswith(f"{self.name}-"):
                _remove(namespace)


def _known_namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []


def _remove(namespace: str) -> None:
    with contextlib.suppress(RuntimeError):
        for pid in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def remove_orphans() -> None:
    """Remove the namespaces of programs that ended without removing them."""
    for namespace in _known_namespaces():
        owner = namespace.removeprefix(f"{_PREFIX}-").split("-")[0]
        if namespace.startswith(f"{_PREFIX}-") and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(namespace)


@contextlib.contextmanager
def open_hosts(num_hosts: int, *, namespaces: bool | None = None) -> Iterator[Hosts]:
    """Yield ``num_hosts`` hosts, and remove them afterwards, also after an error, Ctrl-C or SIGTERM.

    Args:
        namespaces: with True, raise :class:`NotAllowed` if they are impossible; with False, use loopback addresses;
            with None, use namespaces if they are allowed.
    """
    hosts = Hosts(num_hosts, namespaces=namespaces is not False)
    if hosts.namespaces:
        remove_orphans()
        try:
            hosts.make()
        except NotAllowed as error:
            if namespaces:
                raise
            print(f"no network namespaces, so the hosts are loopback addresses: {error}", file=sys.stderr)
            hosts = Hosts(num_hosts, namespaces=False)
    with _sigterm_raises():
        try:
            yield hosts
        finally:
            hosts.remove()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit in this context, so that ``finally`` runs. Signals cannot be set in a thread, where
    this does nothing.
    """
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- One torchrun per host.


_ROOT = Path(__file__).parents[2]
_PORT = 29400


def torchrun(
    hosts: Hosts,
    module: str,
    *arguments: str,
    seconds: float = 300.0,
) -> list[str]:
    """Run ``python -m module arguments`` on two ranks of each host, and return the output of each host.

    Raise RuntimeError with the end of each output if the torchrun of a host ended with an error, or all were killed
    after ``seconds``.
    """
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:{_PORT}", f"--rdzv-id={hosts.name}"]
    size = [f"--nnodes={hosts.num_hosts}", "--nproc-per-node=2"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs = [Path(folder) / f"host{host}" for host in range(hosts.num_hosts)]
        for host, output in enumerate(outputs):
            # Nothing resolves names here. Without these options no host finds itself in the end point, and each tells
            # the others a name.
            local = [f"--local-addr={hosts.address(host)}", f"--rdzv-conf=is_host={'true' if host == 0 else 'false'}"]
            program = [*size, *rendezvous, *local, "-m", module, *arguments]
            file = stack.enter_context(output.open("w"))
            command = [sys.executable, "-m", "torch.distributed.run", *program]
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            started.append(hosts.start(host, command, environment=variables, cwd=_ROOT, **pipes))
            stack.callback(_end, started[-1])
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [process.poll() for process in started]
        printed = [output.read_text(errors="replace") for output in outputs]
    if any(code != 0 for code in codes):
        ends = [text[-4000:] for text in printed]
        raise RuntimeError("\n".join([f"after at most {seconds:g} s, torchrun on the hosts: {codes}.", *ends]))
    return printed


# -- A slow wire, as its own process: ``hosts.py FIRST SECOND DELAY LOSS``  Frames that enter one TAP device leave the
# other one DELAY seconds later in the same order, except for a share LOSS. The process prints "ready" when both devices
# exist. They are removed when it ends.


_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST_FRAME = 65600


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def carry(first: int, second: int, delay: float, loss: float) -> None:
    other = {first: second, second: first}
    # The seed is fixed, so the same packets are dropped in each run that sends the same ones.
    chance = random.Random(0)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for device in select.select([first, second], [], [], wait)[0]:
            frame = os.read(device, _LARGEST_FRAME)
            if chance.random() >= loss:
                under_way.append((time.monotonic() + delay, other[device], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, frame = under_way.popleft()
            try:
                os.write(device, frame)
            except OSError:  # The device is not up yet, or full. A wire loses packets that it cannot carry.
                continue


if __name__ == "__main__":
    taps = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    print("ready", flush=True)
    carry(*taps, float(sys.argv[3]), float(sys.argv[4]))
