"""Answers of a server in the form of OpenAI's API: JSON bodies, server-sent events, and results by URL."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from para_core.fleet.jobs import Job
from para_core.fleet.limits import RequestError
from para_core.fleet.outputs import Output
from para_core.fleet.reading import Body
from para_core.fleet.work import Result

MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp", "gif": "image/gif", "mp4": "video/mp4"}
# Limit on the results that are kept in memory to be fetched by their URL.
_STORED_BYTES = 256 * 2**20
_NO_USAGE = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0),
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class StoredResults:
    """The latest results that were requested by URL, in memory."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, tuple[Output, ...]] = OrderedDict()

    def add(self, id_: str, outputs: tuple[Output, ...]) -> None:
        """Keep a result, and drop the oldest ones beyond the limit."""
        self._results[id_] = outputs
        self._results.move_to_end(id_)
        while len(self._results) > 1 and sum(len(x.data) for o in self._results.values() for x in o) > _STORED_BYTES:
            self._results.popitem(last=False)

    def get(self, id_: str, index: str) -> Output:
        """Return one file of a result.

        Raises:
            RequestError: If it is not kept.
        """
        outputs = {str(i): output for i, output in enumerate(self._results.get(id_, ()))}
        if index not in outputs:
            raise RequestError(404, "not_found", f"result {id_[:64]!r}, {index[:64]!r} is not stored (any more).")
        return outputs[index]


def media_type(output: Output) -> str:
    """Return the media type of a file of a result."""
    return MEDIA_TYPES[output.suffix.rpartition(".")[2]]


def api_format(output: Output) -> str:
    """Return the name of a file's format in OpenAI's API."""
    name = output.suffix.rpartition(".")[2]
    return "jpeg" if name == "jpg" else name


def answer_body(job: Job, result: Result, base_url: str | None) -> dict[str, Any]:
    """Return the JSON body for a result.

    Args:
        base_url (`str`, *optional*): Address of the server, for URLs. Defaults to base64.
    """
    if base_url is not None:
        data = [{"url": f"{base_url}/v1/files/{job.id_}/{index}"} for index in range(len(result.outputs))]
    else:
        data = [{"b64_json": _base64(output)} for output in result.outputs]
    names = ("seconds", "size", "mesh", "versions")
    metadata = {name: result.metadata[name] for name in names if name in result.metadata}
    body = {"id": job.id_, "created": int(time.time()), "data": data, "para_core": metadata}
    if "size" in metadata:
        body["size"] = metadata["size"]
    return {**body, "output_format": api_format(result.outputs[0])}


async def answer_events(
    job: Job, waiting: asyncio.Future[Result], body: Body, kind: str, stored: StoredResults, base_url: str
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a job.

    These are partial images if the request asks for some, and for each result one ``completed``; or ``error``. If the
    request asks for ``progress``, also ``accepted`` and ``progress`` after steps.

    Args:
        waiting (`asyncio.Future[Result]`): The result, or a :class:`RequestError`.
        kind (`str`): Prefix of the events' types, such as ``"image_generation"``.
    """
    if body.progress:
        yield _event({"type": "accepted", "id": job.id_})
    partials = 0
    while not waiting.done() or not job.events.empty():
        getting: asyncio.Future[int | Output] = asyncio.ensure_future(job.events.get())
        either: set[asyncio.Future[Any]] = {getting, waiting}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            continue
        event = getting.result()
        if isinstance(event, Output):
            common = _common(job, event, job.request.size)
            yield _event({"type": f"{kind}.partial_image", **common, "partial_image_index": partials})
            partials += 1
        elif body.progress:
            steps = job.request.fields.get("num_inference_steps")
            yield _event({"type": "progress", "step": event, "steps": steps})
    try:
        result = await waiting
    except RequestError as refusal:
        yield _event({"type": "error", **refusal.body()})
        return
    if body.response_format == "url":
        stored.add(job.id_, result.outputs)
    answer = answer_body(job, result, base_url if body.response_format == "url" else None)
    for output, data in zip(result.outputs, answer["data"], strict=True):
        common = _common(job, output, result.metadata.get("size", job.request.size))
        rest = {"usage": _NO_USAGE, "para_core": answer["para_core"]}
        yield _event({"type": f"{kind}.completed", **common, **data, **rest})


def _common(job: Job, output: Output, size: str) -> dict[str, Any]:
    return {
        "id": job.id_,
        "b64_json": _base64(output),
        "created_at": int(time.time()),
        "size": size,
        "output_format": api_format(output),
        "quality": "auto",
        "background": "opaque",
    }


def _base64(output: Output) -> str:
    return base64.b64encode(output.data).decode()


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
