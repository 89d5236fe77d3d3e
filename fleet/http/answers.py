"""Responses of the server in the form of OpenAI's API: JSON bodies, server-sent events, and results by URL.

`server.py` calls it for each request that was generated. Error responses stand in `errors.py`, those of
asynchronous videos in `videos.py`. Tests: tests/fleet/test_openai.py, tests/fleet/test_server.py.

Each format of a result has a media type:

>>> from para_core.fleet.outputs import FORMATS
>>> {name for names in FORMATS.values() for name in names} == set(MEDIA_TYPES)
True
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from para_core.fleet.http.errors import RequestError
from para_core.fleet.http.jobs import Job
from para_core.fleet.outputs import Output, Result

# By format.
MEDIA_TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
}
# Formats whose names in OpenAI's API differ from the suffix of their files. The other direction is
# bodies._FORMAT_NAMES.
_API_FORMATS = {"jpg": "jpeg"}
_NO_USAGE = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0),
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


def answer_body(
    job: Job, result: Result, base_url: str | None, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON body of the response to a finished request.

    It has URLs of the result's files below ``base_url``, the address of the server, or without one the files
    as base64; the seed of the request and of each file; and ``warnings`` about fields without effect.
    """
    if base_url is not None:
        data: list[dict[str, Any]] = [
            {"url": f"{base_url}/v1/files/{job.id_}/{index}"} for index in range(len(result.outputs))
        ]
    else:
        data = [{"b64_json": _encode_base64(output)} for output in result.outputs]
    seeds = job.request.seeds
    for index, entry in enumerate(data):
        # A pipeline of layers gives several files for each seed, one after the other.
        entry["seed"] = seeds[index * len(seeds) // len(data)]
    names = ("seconds", "size", "mesh", "versions")
    metadata = {name: result.metadata[name] for name in names if name in result.metadata}
    body = {"id": job.id_, "created": int(time.time()), "data": data, "para_core": metadata}
    body |= {"seed": job.request.seed, "warnings": list(warnings)}
    if "size" in metadata:
        body["size"] = metadata["size"]
    format_ = result.outputs[0].format_
    return {**body, "output_format": _API_FORMATS.get(format_, format_)}


async def answer_events(
    job: Job, waiting: asyncio.Future[Result], kind: str, base_url: str | None, warnings: Sequence[str] = ()
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a job, encoded. Their types begin with ``kind``, such as
    ``"image_generation"``.

    The last events are one ``completed`` for each file of the result that ``waiting`` gives, or one ``error``
    if it raises RequestError; another exception is a mistake of the server, and raises. A ``completed`` event
    always has the file as base64, which OpenAI's type of this event requires, and with ``base_url`` its URL,
    too; the rest is as in :func:`answer_body`. Before them come ``partial_image`` events if the request asks
    for previews. If it asks for progress, there are also one ``accepted``, and ``progress`` events with the
    number of finished steps.

    Call this function at most once for a job: it takes the events out of ``job.events``, and puts None there
    as their end.
    """
    progress = job.request.delivery.progress
    if progress:
        yield _encode_event({"type": "accepted", "id": job.id_})
    partials = 0  # number of previews that were sent
    waiting.add_done_callback(lambda _: job.events.put_nowait(None))
    while (event := await job.events.get()) is not None:
        if isinstance(event, Output):
            common = _make_common_fields(job, event, job.request.size)
            yield _encode_event({"type": f"{kind}.partial_image", **common, "partial_image_index": partials})
            partials += 1
        elif progress:
            each = job.request.fields.get("num_inference_steps")
            steps: int | None = None
            if each is not None:
                steps = each * job.request.calls
            yield _encode_event({"type": "progress", "step": event, "steps": steps})
    try:
        result = await waiting
    except RequestError as refusal:
        yield _encode_event({"type": "error", **refusal.body()})
        return
    answer = answer_body(job, result, base_url, warnings)
    for output, data in zip(result.outputs, answer["data"], strict=True):
        common = _make_common_fields(job, output, result.metadata.get("size", job.request.size))
        rest = {"usage": _NO_USAGE, "para_core": answer["para_core"], "warnings": answer["warnings"]}
        yield _encode_event({"type": f"{kind}.completed", **common, **data, **rest})


def _make_common_fields(job: Job, output: Output, size: str) -> dict[str, Any]:
    return {
        "id": job.id_,
        "b64_json": _encode_base64(output),
        "created_at": int(time.time()),
        "size": size,
        "output_format": _API_FORMATS.get(output.format_, output.format_),
        # No request chooses these two: bodies.py accepts them for clients of OpenAI, and ignores them.
        "quality": "auto",
        "background": "auto",
    }


def _encode_base64(output: Output) -> str:
    return base64.b64encode(output.data).decode()


def _encode_event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
