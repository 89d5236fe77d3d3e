"""Requests that no honest client sends, as bytes on a socket, and the status that each one gets."""

import contextlib
import http.client
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from diffusers import FluxKontextPipeline

from tests.fleet.test_server import PATH, StandIn, ask, image_url, serving

JSON = "application/json"


def nested(depth, left="[", right="]"):
    return left * depth + right * depth


def request(body=b'{"prompt": "a"}', *, method="POST", path=PATH, host="127.0.0.1", kind=JSON, extra=b"", length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1"]
    head += [] if host is None else [f"Host: {host}"]
    head += [] if kind is None else [f"Content-Type: {kind}"]
    head += [f"Content-Length: {len(body) if length is None else length}", "Connection: close"]
    return "\r\n".join(head).encode("latin-1") + b"\r\n" + extra + b"\r\n" + body


def form(*parts, boundary="x"):
    texts = [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts]
    return ("".join(texts) + f"--{boundary}--\r\n").encode("latin-1")


def form_request(body, boundary="x", **rest):
    return request(body, kind=f"multipart/form-data; boundary={boundary}", **rest)


def field(name, value):
    return request({"prompt": "a", name: value})


LONG = "word " * 20_000
CORPUS = {
    # -- Bodies.
    "empty body": (400, request(b"")),
    "no JSON": (400, request(b"prompt=a")),
    "half a JSON": (400, request(b'{"prompt": "a"')),
    "two JSONs": (400, request(b'{"prompt": "a"}{}')),
    "JSON null": (400, request(b"null")),
    "JSON number": (400, request(b"1")),
    "JSON text": (400, request(b'"a"')),
    "JSON array": (400, request(b'[{"prompt": "a"}]')),
    "NaN": (400, request(b"NaN")),
    "NUL bytes": (400, request(b"\0" * 100)),
    "UTF-16": (400, request('{"prompt": "a"}'.encode("utf-16"))),
    "UTF-8 with a BOM": (400, request(b'\xef\xbb\xbf{"prompt": "a"}')),
    "invalid UTF-8": (400, request(b'{"prompt": "\xff\xfe"}')),
    "gzip": (400, request(b"\x1f\x8b\x08\x00", extra=b"Content-Encoding: gzip\r\n")),
    "comment": (400, request(b'{"prompt": "a" /* b */}')),
    "trailing comma": (400, request(b'{"prompt": "a",}')),
    "single quotes": (400, request(b"{'prompt': 'a'}")),
    "nested body": (400, request(nested(100_000).encode())),
    "nested objects": (400, request((nested(20_000, '{"a":', "}")).encode())),
    "nested field": (400, field("joint_attention_kwargs", {"a": json.loads(nested(100))})),
    "nested just too deep": (400, field("joint_attention_kwargs", {"a": json.loads(nested(16))})),
    "nested prompt": (400, field("prompt", json.loads(nested(50)))),
    "nested seed": (400, request(f'{{"prompt": "a", "seed": {nested(150)}}}'.encode())),
    "nested 190": (400, request(f'{{"prompt": "a", "joint_attention_kwargs": {nested(190)}}}'.encode())),
    "many keys": (400, request({"prompt": "a", **{f"k{i}": i for i in range(5000)}})),
    "long key": (400, field("k" * 100_000, 1)),
    "same key twice": (200, request(b'{"prompt": "a", "prompt": "b"}')),
    "body above the limit": (413, request(b" " * 200_001)),
    "length above the limit": (413, request(b" " * 200_001, length=300_000)),
    # -- Prompts.
    "no prompt": (400, request({})),
    "null prompt": (400, field("prompt", None)),
    "number as prompt": (400, field("prompt", 5)),
    "empty prompts": (400, field("prompt", [])),
    "null among prompts": (400, field("prompt", ["a", None])),
    "lone surrogate": (400, request(b'{"prompt": "\\ud800"}')),
    "long prompt": (400, field("prompt", LONG)),
    "long negative prompt": (400, field("negative_prompt", LONG)),
    "long second prompt": (400, field("prompt_2", LONG)),
    "long prompt among short ones": (400, field("prompt", ["a", LONG])),
    "many prompts": (400, field("prompt", ["a"] * 10_000)),
    "many negative prompts": (400, field("negative_prompt", ["a" * 9000] * 10)),
    "one long word": (400, field("prompt", "a" * 100_000)),
    "zero-width characters": (400, field("prompt", "\u200b" * 20_000)),
    "combining characters": (400, field("prompt", "e" + "\u0301" * 20_000)),
    "control characters": (200, field("prompt", "a\x00\x1b[31m\r\n")),
    "empty prompt": (200, field("prompt", "")),
    # -- Numbers.
    "steps 0": (400, field("steps", 0)),
    "steps -1": (400, field("steps", -1)),
    "steps as a text": (400, field("steps", "5")),
    "steps as a float": (400, field("steps", 2.5)),
    "steps true": (400, field("steps", True)),
    "steps above the limit": (400, field("steps", 201)),
    "steps huge": (400, field("steps", 10**30)),
    "steps with 5000 digits": (400, request(b'{"prompt": "a", "steps": ' + b"9" * 5000 + b"}")),
    "seed negative": (400, field("seed", -2)),
    "seed above 63 bits": (400, field("seed", 2**63)),
    "seed as a text": (400, field("seed", "7")),
    "seed as an array": (400, field("seed", [1, 2])),
    "guidance NaN": (400, request(b'{"prompt": "a", "guidance_scale": NaN}')),
    "guidance infinite": (400, request(b'{"prompt": "a", "guidance_scale": 1e400}')),
    "guidance as a text": (400, field("guidance_scale", "x")),
    "guidance null": (200, field("guidance_scale", None)),
    "n 0": (400, field("n", 0)),
    "n huge": (400, field("n", 10**9)),
    "sequence length huge": (400, field("max_sequence_length", 10**9)),
    "sequence length 0": (400, field("max_sequence_length", 0)),
    "sigmas too many": (400, field("sigmas", [1.0] * 201)),
    "sigmas as texts": (400, field("sigmas", ["1"])),
    # -- Sizes.
    "size of one number": (400, field("size", "64")),
    "size of three numbers": (400, field("size", "64x64x64")),
    "size 0": (400, field("size", "0x0")),
    "size negative": (400, field("size", "-8x8")),
    "size too large": (400, field("size", "4096x4096")),
    "size huge": (400, field("size", "999999999x999999999")),
    "size with 5000 digits": (400, field("size", "9" * 5000 + "x1")),
    "size of full-width digits": (400, field("size", "\uff16\uff14x\uff16\uff14")),
    "size with a line break": (400, field("size", "64x64\n\n")),
    "size as an array": (400, field("size", [64, 64])),
    "height too large": (400, field("height", 2**31)),
    # -- Fields.
    "unknown field": (400, field("promt", "b")),
    "generator": (400, field("generator", 1)),
    "latents": (400, field("latents", [1])),
    "embeddings": (400, field("prompt_embeds", [[1.0]])),
    "callback": (400, field("callback_on_step_end", "os.system")),
    "output type": (400, field("output_type", "latent")),
    "self": (400, field("self", {})),
    "dunder": (400, field("__class__", "x")),
    "prototype": (400, field("__proto__", {"a": 1})),
    "response format": (400, field("response_format", "path")),
    "output format": (400, field("output_format", "exe")),
    "output format of a video": (400, field("output_format", "mp4")),
    "compression above 100": (400, field("output_compression", 101)),
    "compression negative": (400, field("output_compression", -1)),
    "partial images": (400, field("partial_images", 1000)),
    "stream as a text": (400, field("stream", "yes")),
    # -- Images.
    "image as a path": (400, field("image", "/etc/passwd")),
    "image as a file URL": (400, field("image", "file:///etc/passwd")),
    "image as an address": (400, field("image", "http://169.254.169.254/latest")),
    "image as a number": (400, field("image", 1)),
    "image that is none": (400, field("image", "data:image/png;base64,AAAA")),
    "image as SVG": (400, field("image", "data:image/svg+xml;base64,PHN2Zy8+")),
    "image of many pixels": (400, field("image", image_url(4096, 4096))),
    "too many images": (400, field("image", [image_url()] * 17)),
    "no images": (400, field("image", [])),
    "image reference without a URL": (400, field("image", {"file_id": "x"})),
    # -- Forms.
    "form without a boundary": (400, request(form(("name=prompt", "a")), kind="multipart/form-data")),
    "form with another boundary": (400, form_request(form(("name=prompt", "a")), boundary="y")),
    "empty form": (400, form_request(b"--x--\r\n")),
    "form without a name": (400, form_request(form(("filename=a", "a")))),
    "form that ends early": (400, form_request(b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na')),
    "form of many fields": (400, form_request(form(*[(f'name="k{i}"', "1") for i in range(500)]))),
    "form of many files": (400, form_request(form(*[('name="image"; filename="a"', "b")] * 100))),
    "form with a text as image": (400, form_request(form(('name="prompt"', "a"), ('name="image"', "/etc/passwd")))),
    "form with a broken file": (
        400,
        form_request(form(('name="prompt"', "a"), ('name="image"; filename="../../x"', "GIF89a"))),
    ),
    "form with a file as prompt": (400, form_request(form(('name="prompt"; filename="p"', "\xff\xfe" * 9000)))),
    "form with nested JSON": (400, form_request(form(('name="prompt"', "a"), ('name="seed"', nested(50_000))))),
    "form with a long prompt": (400, form_request(form(('name="prompt"', LONG)))),
    "form of OpenAI's names": (200, form_request(form(('name="prompt"', "a"), ('name="n"', "1")))),
    # -- Types, hosts and origins.
    "no content type": (415, request(kind=None)),
    "text/plain": (415, request(kind="text/plain")),
    "a simple form": (415, request(b"prompt=a", kind="application/x-www-form-urlencoded")),
    "pickle": (415, request(b"cos\nsystem\n", kind="application/python-pickle")),
    "content type in capitals": (200, request(kind="Application/JSON; charset=utf-8")),
    "no host": (400, request(host=None)),
    "empty host": (400, request(host="")),
    "host with a space": (400, request(host="127.0.0.1 evil")),
    "host with a path": (400, request(host="127.0.0.1/evil")),
    "host with a user": (400, request(host="127.0.0.1@evil.example")),
    "host with a bad port": (400, request(host="127.0.0.1:80:90")),
    "host with a letter as port": (400, request(host="127.0.0.1:x")),
    "two hosts": (400, request(extra=b"Host: evil.example\r\n")),
    "foreign host": (403, request(host="evil.example")),
    "host that begins like loopback": (403, request(host="127.0.0.1.evil.example")),
    "host of all addresses": (403, request(host="0.0.0.0")),
    "loopback in capitals": (200, request(host="LocalHost:80")),
    "loopback of IPv6": (200, request(host="[::1]:80")),
    "page of another site": (403, request(extra=b"Origin: http://evil.example\r\n")),
    "form of another site": (
        403,
        form_request(form(('name="prompt"', "a")), extra=b"Origin: https://evil.example\r\n"),
    ),
    "sandboxed page": (403, request(extra=b"Origin: null\r\n")),
    "own page": (200, request(extra=b"Origin: http://127.0.0.1\r\n")),
    # -- Identifiers and paths.
    "id as a path": (409, request(extra=b"X-Request-Id: ../../x\r\n")),
    "id too long": (409, request(extra=b"X-Request-Id: " + b"a" * 65 + b"\r\n")),
    "id in Latin-1": (409, request(extra=b"X-Request-Id: \xe9\r\n")),
    "GET of a POST route": (405, request(b"", method="GET")),
    "PUT": (405, request(method="PUT")),
    "TRACE": (405, request(b"", method="TRACE")),
    "unknown method": (400, request(b"", method="BREW")),
    "unknown path": (404, request(path="/v1/chat/completions")),
    "path with dots": (404, request(b"", method="GET", path="/v1/files/../../etc/passwd")),
    "path with encoded dots": (404, request(b"", method="GET", path="/v1/files/%2e%2e/%2e%2e")),
    "path with NUL": (404, request(b"", method="GET", path="/v1/files/a/%00")),
    "file of no result": (404, request(b"", method="GET", path="/v1/files/x/0")),
    "model of another name": (404, request(b"", method="GET", path="/v1/models/..%2f..%2fetc")),
    "cancel of no request": (404, request(b"", method="DELETE", path=f"{PATH}/none")),
    # -- HTTP.
    "no HTTP": (400, b"hello\r\n\r\n"),
    "TLS on the plain port": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100),
    "length that is no number": (400, request(length="x")),
    "negative length": (400, request(length=-1)),
    "huge header": (431, request(extra=b"X: " + b"a" * 200_000 + b"\r\n")),
    "bad chunk": (
        400,
        request(b"zz\r\n", length="0\r\nTransfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b""),
    ),
}


@pytest.fixture(scope="module")
def server():
    with serving(body_bytes=200_000, pipeline=FluxKontextPipeline) as (port, backend):
        yield port, backend


def send(port, data):
    """Return the status of the answer, which comes within seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # The server may answer and close before it has read everything.
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in answer and (part := connection.recv(65536)):
                answer += part
    return int(answer.split()[1])


def test_corpus_is_large():
    assert len(CORPUS) >= 100


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_request_gets_its_status(server, name):
    port, backend = server
    status, data = CORPUS[name]
    ran = len(backend.ran)
    assert send(port, data) == status
    assert len(backend.ran) == ran + (status == 200)
    assert backend.deaths == 0


def latencies(port, requests):
    """Return the seconds of honest requests."""

    def one(_):
        start = time.perf_counter()
        assert ask(port, {"prompt": "a", "steps": 2})[0] == 200
        return time.perf_counter() - start

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(one, range(requests)))


@pytest.mark.long
def test_long_texts_do_not_delay_honest_clients():
    body = json.dumps({"prompt": "word " * 2_000_000}).encode()
    with serving(StandIn(0.05), waiting=20) as (port, _):
        alone = statistics.median(latencies(port, 32))
        over, statuses = threading.Event(), []

        def attack():
            while not over.is_set() and len(statuses) < 100:
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                    connection.request("POST", PATH, body, {"Content-Type": JSON})
                    statuses.append(connection.getresponse().status)

        attacker = threading.Thread(target=attack)
        attacker.start()
        beside = statistics.median(latencies(port, 32))
        over.set()
        attacker.join()
    assert set(statuses) == {400}
    assert beside < 2 * alone
