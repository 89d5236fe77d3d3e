"""Values that travel between the caller and its ranks."""

import pickle
import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from para_core.launcher.pickling import generators_in
from para_core.launcher.wire import Body, Channel

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


@pytest.fixture(params=["this process", "Unix socket", "TCP"])
def travel(request):
    """Return a function that returns a value as it arrives."""

    def to_this_process(value):
        return Body.of(value).load()

    def over(pair):
        ours, theirs = map(Channel, pair)

        def send_and_receive(value):
            # The body may fill the socket's buffer, so its sender waits for the receiver.
            sender = threading.Thread(target=ours.send, args=(("value", 3), Body.of(value)))
            sender.start()
            head, body = theirs.receive()
            sender.join()
            assert head == ("value", 3)
            return body.load()

        request.addfinalizer(lambda: [channel.close() for channel in (ours, theirs)])
        return send_and_receive

    if request.param == "this process":
        return to_this_process
    return over(socket.socketpair() if request.param == "Unix socket" else tcp_pair())


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (300, 400)])
def test_tensors_arrive_with_their_bits(travel, dtype, shape):
    x = (torch.rand(shape) * 100).to(dtype)
    for sent in (x, x.mT.conj() if x.ndim == 2 else x, torch.nn.Parameter(x, requires_grad=False)):
        arrived = travel({"x": [sent]})["x"][0]
        assert (type(arrived), arrived.dtype, arrived.shape) == (type(sent), dtype, sent.shape)
        assert torch.equal(bits(arrived), bits(sent))


@given(st.lists(st.integers(0, 200_000), max_size=5), st.binary(max_size=100))
def test_arrays_of_any_size_arrive_together(sizes, rest):
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    arrived, also = Body.of((arrays, rest)).load()
    assert also == rest
    for array, original in zip(arrived, arrays, strict=True):
        assert np.array_equal(array, original)
        assert array.flags.writeable


def test_what_one_receiver_writes_no_other_sees():
    body = Body.of(np.zeros(100_000, dtype=np.uint8))
    first, second = body.load(), body.load()
    first[:] = 1
    assert not second.any()
    assert not body.load().any()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "I;16", "1"])
def test_images_arrive(travel, mode):
    image = Image.new(mode, (300, 200))
    image.info["dpi"] = (72, 72)
    image.putpixel((3, 4), 1)
    arrived = travel(image)
    assert (arrived.mode, arrived.size, arrived.info) == (mode, (300, 200), {"dpi": (72, 72)})
    assert arrived.tobytes() == image.tobytes()


def test_generators_arrive_with_their_state(travel):
    generator = torch.Generator().manual_seed(4)
    torch.rand(5, generator=generator)
    first, second = travel([generator, generator])
    assert first is second
    assert torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=generator))


def test_generators_are_found_once_in_nested_arguments():
    a, b = torch.Generator(), torch.Generator()
    assert generators_in(((a, [b, a]), {"generator": {"x": b}, "other": 1})) == [a, b]


def test_functions_of_a_script_arrive_by_value_and_locks_are_refused():
    namespace = {"__name__": "__main__", "factor": 3}
    exec("def times(x): return x * factor", namespace)
    assert pickle.loads(Body.of(namespace["times"]).data)(2) == 6
    assert Body.of(socket.socket).load() is socket.socket
    for value in (threading.Lock(), (x for x in range(3))):
        with pytest.raises(TypeError, match="cannot be sent"):
            Body.of([value])


def test_end_of_the_other_process_is_an_eof_error():
    ours, theirs = map(Channel, socket.socketpair())
    ours.end()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match=r".*"):
        ours.send(("x",))
    ours.close()
    theirs.close()
