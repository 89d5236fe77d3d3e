"""Two TAP devices joined by a wire that is slow and drops: ``wire.py FIRST SECOND DELAY LOSS``. Standard library only.

Frames that enter one device leave the other DELAY seconds later, in their order, but for a share LOSS of them. Prints "ready" once
both devices are there; they go when the process ends. It runs in the network namespace that it is started in.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST_FRAME = 65600


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def carry(first: int, second: int, delay: float, loss: float) -> None:
    other = {first: second, second: first}
    # The same packets are dropped in each run that sends the same.
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
            except OSError:  # the device is not up yet, or full: a wire loses what it cannot carry
                continue


if __name__ == "__main__":
    taps = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    print("ready", flush=True)
    carry(*taps, float(sys.argv[3]), float(sys.argv[4]))
