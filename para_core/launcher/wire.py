"""Messages between the caller and a rank: a small head, and a body whose large buffers processes of a host share.

What a head and a body say is in ``messages.py`` and in the files that send them. Tests: tests/launcher/test_wire.py.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from para_core.launcher.pickling import dump

# Buffers of fewer bytes stay in the pickle.
_LARGE = 1 << 16
# Buffers begin at multiples of this number of bytes, so that tensors of every dtype are aligned.
_ALIGNMENT = 64
# Shared memory of this number of bytes or more is mapped, less is copied.
_MAPPED = 1 << 26
# Lengths of the head and of the pickle in bytes, number of buffers, and whether the buffers follow in the
# stream.
_HEADER = struct.Struct("<IQI?")


class Body:
    """A pickled value. ``storage`` holds its large buffers, whose lengths are ``sizes``.

    The storage is a file descriptor of anonymous memory, or, after a message over TCP, a bytearray.
    """

    def __init__(
        self, data: bytes, sizes: Sequence[int] = (), storage: int | bytearray | None = None
    ) -> None:
        self.data, self.sizes, self.storage = data, list(sizes), storage

    @classmethod
    def of(cls, value: Any, by_value: str | None = None) -> Body:
        """Return ``value`` pickled by :func:`dump`. Raise TypeError if that is not possible, and OSError if
        there is no room for its large buffers.
        """
        buffers: list[memoryview] = []

        def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _LARGE:
                buffers.append(raw)
            return raw.nbytes < _LARGE

        data = dump(value, keep_in_pickle, by_value)
        return cls(
            data, [raw.nbytes for raw in buffers], _write_to_shared_memory(buffers) if buffers else None
        )

    def load(self) -> Any:
        """Return the value. Its arrays can be written to. Neither other processes nor later calls of this
        method see what is written.

        Raises:
            OSError: The storage did not arrive.
        """
        if self.storage is None and self.sizes:
            # The kernel drops a descriptor for which the receiving process has no room.
            raise OSError("large buffers of a message were lost: too many open files (ulimit -n).")
        if self.storage is None:
            return pickle.loads(self.data)
        return pickle.loads(self.data, buffers=self._views())

    def _views(self) -> list[memoryview]:
        """Return a new copy of each buffer. Those in much anonymous memory share its pages until they are
        written to.
        """
        if isinstance(self.storage, int):
            memory = memoryview(mmap.mmap(self.storage, 0, access=mmap.ACCESS_COPY))
            if memory.nbytes < _MAPPED:
                # A mapping holds a descriptor as long as a value uses it, and a process may have only 1,024.
                memory = memoryview(bytearray(memory))
        else:
            memory = memoryview(bytearray(self.storage or b""))
        views, start = [], 0
        for size in self.sizes:
            views.append(memory[start : start + size])
            start += _aligned_size(size)
        return views

    def __reduce__(self) -> Any:
        """Pickle the buffers themselves: a body inside another value goes to a process that has no such descriptor."""
        storage = self.storage
        if isinstance(storage, int):
            with mmap.mmap(storage, 0, access=mmap.ACCESS_READ) as memory:
                storage = bytearray(memory)
        return Body, (self.data, self.sizes, storage)

    def __del__(self) -> None:
        if isinstance(self.storage, int):
            os.close(self.storage)


def _aligned_size(size: int) -> int:
    """Return the number of bytes from the begin of a buffer of ``size`` bytes to that of the next one."""
    return size + -size % _ALIGNMENT


def _write_to_shared_memory(buffers: Sequence[memoryview]) -> int:
    """Return a file descriptor of memory that holds ``buffers``, each at a multiple of ``_ALIGNMENT``.

    The memory has no name, so nothing is left if a process dies. It is no file in /dev/shm, whose size is
    limited.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("para_core")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        for raw in buffers:
            view = raw
            while len(view):
                view = view[os.write(fd, view) :]
            os.lseek(fd, _aligned_size(raw.nbytes) - raw.nbytes, os.SEEK_CUR)
        os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
    except BaseException:
        os.close(fd)
        raise
    return fd


class Channel:
    """One end of the connection between the caller and a rank. One thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        self._shares_memory = sock.family == socket.AF_UNIX

    def send(self, head: tuple[Any, ...], body: Body | None = None) -> None:
        """Send a message. Raise OSError if the other process has ended."""
        body = body or Body(b"")
        first = pickle.dumps(head)
        sizes = struct.pack(f"<{len(body.sizes)}Q", *body.sizes)
        inline = body.storage is not None and not (self._shares_memory and isinstance(body.storage, int))
        header = _HEADER.pack(len(first), len(body.data), len(body.sizes), inline)
        fds = [body.storage] if isinstance(body.storage, int) and not inline else []
        with self._lock:
            # Ancillary data need at least one byte beside them; a short write sends them with its first byte.
            sent = socket.send_fds(self._sock, [header], fds) if fds else self._sock.send(header)
            self._sock.sendall(b"".join((header[sent:], sizes, first, body.data)))
            if inline:
                self._send_storage(body)

    def _send_storage(self, body: Body) -> None:
        """Send the large buffers in the stream, with the gaps that align them. The caller holds the lock."""
        if isinstance(body.storage, int):
            with mmap.mmap(body.storage, 0, access=mmap.ACCESS_READ) as memory:
                self._sock.sendall(memory)
        elif body.storage is not None:
            self._sock.sendall(body.storage)

    def receive(self) -> tuple[tuple[Any, ...], Body]:
        """Return the head and the body of the next message. Raise EOFError if the other process has ended.

        It unpickles the head, so the other end must be a process that this package has started.
        """
        try:
            return self._receive()
        except OSError:
            raise EOFError from None

    def _receive(self) -> tuple[tuple[Any, ...], Body]:
        """Return the next message. Its parts come as :meth:`send` sends them: header, sizes, head, pickle,
        and the buffers if they follow in the stream.
        """
        # The body owns its descriptor at once, which it closes if the rest of the message does not come.
        start, body = b"", Body(b"")
        if self._shares_memory:
            start, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, 1)
            body.storage = fds[0] if fds else None
        header = start + self._receive_exactly(_HEADER.size - len(start))
        head_size, data_size, count, inline = _HEADER.unpack(header)
        body.sizes = list(struct.unpack(f"<{count}Q", self._receive_exactly(8 * count)))
        head = pickle.loads(self._receive_exactly(head_size))
        body.data = bytes(self._receive_exactly(data_size))
        if inline:
            body.storage = self._receive_exactly(sum(map(_aligned_size, body.sizes)))
        return head, body

    def _receive_exactly(self, size: int) -> bytearray:
        """Return the next ``size`` bytes. Raise EOFError if the connection ends before."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return data

    def end(self) -> None:
        """End the connection, so that the thread that receives at either end gets an EOFError."""
        with suppress(OSError):  # The other process has ended.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. The thread that receives calls this after its EOFError."""
        self._sock.close()
