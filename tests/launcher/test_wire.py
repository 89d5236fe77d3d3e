"""Values that travel between the caller and its ranks."""

import itertools
import socket
import threading
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from para_core.launcher.messages import Outcome
from para_core.launcher.rank import _body_of
from para_core.launcher.wire import Body, Channel

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8)


@pytest.fixture
def travel():
    """Return a function that returns the body of a value as it arrives over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = Channel(socket.create_connection(server.getsockname())), Channel(server.accept()[0])

    def send_and_receive(value):
        # The body may fill the socket's buffer, so its sender waits for the receiver.
        sender = threading.Thread(target=ours.send, args=(("value", 3), Body.of(value)))
        sender.start()
        head, body = theirs.receive()
        sender.join()
        assert head == ("value", 3)
        return body

    yield send_and_receive
    ours.close()
    theirs.close()


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def test_tensors_arrive_with_their_bits(travel):
    for dtype, shape in itertools.product(DTYPES, [(), (0, 3), (3, 5), (300, 400)]):
        x = (torch.rand(shape) * 100).to(dtype)
        for sent in (x, x.mT.conj() if x.ndim == 2 else x, torch.nn.Parameter(x, requires_grad=False)):
            arrived = travel({"x": [sent]}).load()["x"][0]
            assert (type(arrived), arrived.dtype, arrived.shape) == (type(sent), dtype, sent.shape)
            assert torch.equal(bits(arrived), bits(sent)), (dtype, shape)


def test_what_one_receiver_writes_no_other_sees(travel, monkeypatch):
    value = ([np.arange(size, dtype=np.uint8) for size in (0, 3, 200_000)], b"rest")
    kept = [(body.load(), body.storage) for body in (Body.of(value) for _ in range(9))]
    assert len({descriptor for _, descriptor in kept}) < 9  # A value keeps none, so they are used again.
    with pytest.raises(OSError, match="open files"):
        Body(Body.of(value).data, [200_000]).load()
    sent, (ours, theirs) = Body.of(value), socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"half"], [sent.storage])
        ours.shutdown(socket.SHUT_WR)
        descriptors = psutil.Process().num_fds()
        with pytest.raises(EOFError):
            Channel(theirs).receive()
        assert psutil.Process().num_fds() == descriptors
    with monkeypatch.context() as patch:
        patch.setattr("os.write", mock.Mock(side_effect=OSError("no space left")))
        outcome = _body_of(Outcome(value, None)).load()
    assert outcome.value is None and "no space left" in str(outcome.error)
    monkeypatch.setattr("para_core.launcher.wire._MAPPED", 1)
    for body in (Body.of(value), travel(value), travel(Body.of(value)).load()):
        for array in body.load()[0]:
            array[:] = 7
        arrays, rest = body.load()
        assert rest == b"rest"
        assert all(np.array_equal(x, np.arange(len(x), dtype=np.uint8)) and x.flags.writeable for x in arrays)


def test_images_arrive(travel):
    for mode in ("L", "RGB", "RGBA", "P", "I;16", "1"):
        image = Image.new(mode, (300, 200))
        image.info["dpi"] = (72, 72)
        image.putpixel((3, 4), 1)
        arrived = travel(image).load()
        assert (arrived.mode, arrived.size, arrived.info) == (mode, (300, 200), {"dpi": (72, 72)})
        assert arrived.tobytes() == image.tobytes()
