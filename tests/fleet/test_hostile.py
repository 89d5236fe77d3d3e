"""Requests that no honest client sends, as bytes on a socket: the status and the words that each one gets."""

import contextlib
import json
import re
import socket

import pytest
from PIL import Image

from tests.fleet.test_server import PATH, image_url

JSON = "application/json"


def nested(depth, left="[", right="]"):
    return left * depth + right * depth


def request(body=b'{"prompt": "a"}', *, method="POST", path=PATH, host="127.0.0.1", kind=JSON, extra=b"", length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1"]
    head += [f"Host: {host}"]
    head += [] if kind is None else [f"Content-Type: {kind}"]
    head += [f"Content-Length: {len(body) if length is None else length}", "Connection: close"]
    return "\r\n".join(head).encode("latin-1") + b"\r\n" + extra + b"\r\n" + body


def form(*parts, boundary="x"):
    texts = [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts]
    return ("".join(texts) + f"--{boundary}--\r\n").encode("latin-1")


def form_request(body, boundary="x", **rest):
    return request(body, kind=f"multipart/form-data; boundary={boundary}", **rest)


def get(path):
    return request(b"", method="GET", path=path)


LONG = "word " * 20_000
PROMPT, FILE = ('name="prompt"', "a"), 'name="prompt"; filename="p"'
# Each row has the status, words of the message, and the bytes.
CORPUS = {
    "empty body": (400, "body .*JSON", request(b"")),
    "JSON array": (400, "body .*object", request(b'[{"prompt": "a"}]')),
    "nested body": (400, "body .*JSON", request(nested(100_000).encode())),
    "nested 190": (400, "nested", request(f'{{"prompt": "a", "joint_attention_kwargs": {nested(190)}}}'.encode())),
    "same key twice": (200, "", request(b'{"prompt": "a", "prompt": "b"}')),
    "body above the limit": (413, "200000 bytes", request(b" " * 200_001)),
    "lone surrogate": (400, "JSON", request(b'{"prompt": "\\ud800"}')),
    "steps with 5000 digits": (400, "", request(b'{"prompt": "a", "steps": ' + b"9" * 5000 + b"}")),
    "form without a boundary": (400, "form", request(form(PROMPT), kind="multipart/form-data")),
    "form that ends early": (400, "", form_request(b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na')),
    "form of many fields": (400, "form", form_request(form(*[(f'name="k{i}"', "1") for i in range(500)]))),
    "form with a broken file": (400, "image", form_request(form(PROMPT, ('name="image"; filename="../x"', "GIF89a")))),
    "form with a file as prompt": (400, "'prompt' is a file", form_request(form((FILE, "\xff\xfe" * 9000)))),
    "form with two prompts, one a file": (400, "'prompt' is a file", form_request(form(PROMPT, (FILE, "a")))),
    "no content type": (415, "multipart", request(kind=None)),
    "a simple form": (415, "multipart", request(b"prompt=a", kind="application/x-www-form-urlencoded")),
    "content type in capitals": (200, "", request(kind="Application/JSON; charset=utf-8")),
    "host with a path": (400, "Host", request(host="127.0.0.1/evil")),
    "two hosts": (400, "", request(extra=b"Host: evil.example\r\n")),
    "host that begins like loopback": (403, "no API key", request(host="127.0.0.1.evil.example")),
    "loopback in capitals": (200, "", request(host="LocalHost:80")),
    "loopback of IPv6": (200, "", request(host="[::1]:80")),
    "page of another site": (403, "evil.example .*--cors", request(extra=b"Origin: http://evil.example\r\n")),
    "malformed page": (403, "--cors", request(extra=b"Origin: http://[\r\n")),
    "own page": (200, "", request(extra=b"Origin: http://127.0.0.1\r\n")),
    "forwarded page": (403, "", request(extra=b"Origin: http://e.org\r\nX-Forwarded-Host: e.org\r\n")),
    "id as a path": (409, "X-Request-Id", request(extra=b"X-Request-Id: ../../x\r\n")),
    "id too long": (409, "X-Request-Id", request(extra=b"X-Request-Id: " + b"a" * 65 + b"\r\n")),
    "file of no result": (404, "'x'", get("/v1/files/x/0")),
    "GET of a POST route": (405, f"POST {PATH}", get(PATH)),
    "result that cannot be encoded": (500, "cannot be encoded: no encoder", request({"prompt": "not encoded"})),
    "huge header": (431, "", request(extra=b"X: " + b"a" * 200_000 + b"\r\n")),
    "bad chunk": (
        *(400, ""),
        request(b"zz\r\n", length="0\r\nTransfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b""),
    ),
}
VALUES = [("steps", 0), ("steps", 2.5), ("seed", -2), ("seed", 2**63), ("guidance_scale", "much"), ("prompt_2", 5)]
VALUES += [("steps", 201), ("output_format", "mp4"), ("output_compression", 101)]
# A PNG with a palette that is missing, and a color of it that is transparent.
NO_PALETTE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAMAAAAoyzS7AAAAAXRSTlMAQObYZgAAAApJREFUeJxjYAAAAAIAAUivpHE="
# Fields besides a prompt, each with words of the refusal, "" if it is accepted.
FIELDS = [
    *[({"prompt": prompt}, "'prompt'") for prompt in (None, ["a", None])],
    ({"prompt": LONG}, "'prompt' has 100000 characters.* at most 16384 for each of 1"),
    ({"prompt": ["a", LONG]}, "'prompt' has 100001"),
    *[({"prompt": prompt}, "") for prompt in ("a\x00\x1b[31m\r\n", "")],
    ({"joint_attention_kwargs": {"a": json.loads(nested(16))}}, "nested more than 16"),
    ({"joint_attention_kwargs": {"a": json.loads(nested(15))}, "prompt_2": ["b"], "negative_prompt": None}, ""),
    ({"joint_attention_kwargs": {"scale": float("inf")}}, "JSON|'joint_attention_kwargs' .*inf"),
    ({f"k{i}": i for i in range(5000)}, "'k0'"),
    *[({name: value}, f"'{name}' .*{value}") for name, value in VALUES],
    ({"steps": 200, "seed": 2**63 - 1, "max_sequence_length": 4096}, ""),
    ({"guidance_scale": float("nan")}, "'guidance_scale' .*nan.* finite"),
    ({"max_sequence_length": 10**9}, "'max_sequence_length' .*1000000000.* 4096"),
    ({"sigmas": [1.0] * 201}, "'sigmas' has 201 .* 200"),
    ({"sigmas": [1.0, "0"]}, "'sigmas' .*'0'"),
    *[({"size": size}, "'size'") for size in ("0x8", "9" * 5000 + "x1", "\uff16\uff14x\uff16\uff14")],
    ({"size": "1024x1024", "n": 16}, "4194304 .*512x512"),
    ({"prompt": ["a"] * 16, "size": "1024x1024"}, "16777216 pixels"),
    ({"width": 4096}, "16777216 pixels"),
    ({"size": "65504x16", "output_format": "jpeg"}, "'width' is 65504.* jpg .* 65500"),
    ({"size": "auto", "width": 32, "height": 32, "steps": None, "num_inference_steps": 3}, ""),
    ({"height": 10**400}, "'height' "),
    ({"image": image_url(Image.new("1", (4096, 4096)))}, "4096 × 4096 .*4194304"),
    ({"image": f"data:image/png;base64,{NO_PALETTE}"}, "^field 'image': 68 bytes are not a readable image"),
    ({"image": [image_url()] * 16, "size": "2048x2048"}, ""),
    ({"prompt": "refused"}, "the pipeline says no"),
]


@pytest.fixture(scope="module")
def server(served):
    return served(body_bytes=200_000)


def send(port, data):
    """Return status and text of the answer, which comes within seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # The server may answer and close before it has read everything.
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


def check(server, data, status, words):
    """Send bytes, and compare status and words of the answer. Only a request that is accepted runs."""
    port, backend = server
    ran = len(backend.ran)
    answered, text = send(port, data)
    assert answered == status, text
    assert len(backend.ran) == ran + (status == 200)
    assert backend.deaths == 0
    if words:
        assert re.search(words, json.loads(text)["error"]["message"])


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_request_gets_its_status(server, name):
    status, words, data = CORPUS[name]
    check(server, data, status, words)


@pytest.mark.parametrize(("fields", "words"), FIELDS)
def test_field_is_refused_with_its_value_or_accepted(server, fields, words):
    check(server, request({"prompt": "a", **fields}), 400 if words else 200, words)
