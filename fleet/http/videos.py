"""Asynchronous videos: requests that run without a waiting client, with results that are kept on disk for a
while.

`server.py` adds these routes for pipelines of videos; ``/v1/videos/sync`` is one of its own. Tests:
tests/fleet/test_openai.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse

from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.errors import RequestError
from para_core.fleet.http.jobs import Job, Jobs
from para_core.fleet.http.middleware import escape_unprintable
from para_core.fleet.pipeline_info import FRAME_PARAMETERS
from para_core.fleet.request import Request
from para_core.fleet.result_files import delete_temporary_files, write_atomically

logger = logging.getLogger(__name__)
_ID_PATTERN = re.compile(r"video_[0-9a-f]{32}")
_RUNNING_STATES = ("queued", "in_progress")


class Videos:
    """Asynchronous videos of one server. Each has a JSON record and its files in a folder, which survive a
    restart.

    A video that was not finished when an earlier server ended gets the status ``failed``. The public methods
    are the routes below ``/v1/videos``; the page ``/docs`` shows their docstrings. They return records in the
    form of OpenAI's API. ``read`` reads and validates the body of an HTTP request, ``card`` is the model's of
    `model_card.py`, and ``warn`` returns the warnings about the fields of a request. The folder
    ``options.videos`` is created if it does not exist. Each running server needs its own, which
    `host_server.py` locks: another server would take the videos that run in it for those of an earlier one.
    """

    def __init__(
        self,
        jobs: Jobs,
        read: Callable[[HttpRequest], Awaitable[Request]],
        options: ServerOptions,
        card: Mapping[str, Any],
        warn: Callable[[Job], tuple[str, ...]],
    ) -> None:
        self._jobs = jobs
        self._read = read
        self._options = options
        self._model: str = card["id"]
        self._defaults: Mapping[str, Any] = card["defaults"]
        self._warn = warn
        self._folder = folder = options.videos or Path()  # Without a folder the server has no such routes.
        self._running: dict[str, Job] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._records: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        # An earlier server may have been killed while it wrote a video.
        delete_temporary_files(folder, _ID_PATTERN.pattern)
        for path in folder.glob("video_*.json"):
            # Files that hold no record are left alone.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                record = json.loads(path.read_bytes())
                is_record = (
                    _ID_PATTERN.fullmatch(record["id"])
                    and {"status", "created_at", "expires_at"} <= record.keys()
                )
                if is_record and path.stem == record["id"]:
                    self._records[record["id"]] = record
        for record in self._records.values():
            if record["status"] in _RUNNING_STATES:
                self._fail(record, "server_restarted", "the server ended before the video was done.")
        self._delete_expired()

    async def create(self, http: HttpRequest) -> dict[str, Any]:
        """Start generating a video, and return its record at once."""
        request = await self._read(http)
        id_ = f"video_{uuid.uuid4().hex}"
        job = self._jobs.start(request, id_)
        values = {**self._defaults, **request.fields}
        frames = next((values[name] for name in FRAME_PARAMETERS if values.get(name)), 0)
        prompt = request.fields.get("prompt")
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt)
        record = {
            "id": id_,
            "object": "video",
            "created_at": int(time.time()),
            "status": "queued",
            "progress": 0,
            "model": self._model,
            "prompt": prompt,
            "seconds": f"{frames / self._options.delivery.fps:g}",
            "size": request.size,
            "seed": request.seed,
            "warnings": list(self._warn(job)),
            "completed_at": None,
            "expires_at": None,
            "error": None,
        }
        self._records[id_], self._running[id_] = record, job
        try:
            self._write(record)
        except OSError as error:
            del self._records[id_], self._running[id_]
            self._jobs.end(job)
            raise RequestError(
                507, "disk", f"{self._folder} cannot be written to: {error.strerror}."
            ) from None
        task = asyncio.ensure_future(self._finish(job, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self._get(id_)

    def _get(self, id_: str) -> dict[str, Any]:
        """Return the record of a video. Raise RequestError (404) if there is none."""
        self._delete_expired()
        if id_ not in self._records:
            raise RequestError(404, "not_found", f"no video {id_[:64]!r} exists (any more).")
        return self._show(id_)

    def _show(self, id_: str) -> dict[str, Any]:
        """Return the record of a video as clients see it, with its progress if it runs."""
        shown = {name: value for name, value in self._records[id_].items() if name != "files"}
        job = self._running.get(id_)
        if job is not None and job.steps_done:
            each = {**self._defaults, **job.request.fields}.get("num_inference_steps")
            steps = job.steps_done + 1  # at least, if their number is unknown
            if each:
                steps = each * job.request.calls
            # The record itself stays queued until the video ends.
            shown |= {"status": "in_progress", "progress": min(99, 100 * job.steps_done // steps)}
        return shown

    async def get(self, video_id: str) -> dict[str, Any]:
        """Show the status of a video."""
        return self._get(video_id)

    async def list(self, after: str | None = None, limit: int = 20, order: str = "desc") -> dict[str, Any]:
        """List the videos that run or are kept, by time of creation: at most ``limit``, beginning after
        ``after``.
        """
        self._delete_expired()
        ids = sorted(
            self._records, key=lambda id_: (self._records[id_]["created_at"], id_), reverse=order != "asc"
        )
        if after is not None:
            if after not in ids:
                raise RequestError(404, "not_found", f"no video {after[:64]!r} exists (any more).")
            ids = ids[ids.index(after) + 1 :]
        page = ids[: max(1, min(limit, 100))]
        ends: dict[str, str | None] = {"first_id": None, "last_id": None}
        if page:
            ends = {"first_id": page[0], "last_id": page[-1]}
        return {
            "object": "list",
            "data": [self._show(id_) for id_ in page],
            "has_more": len(ids) > len(page),
            **ends,
        }

    async def content(self, video_id: str, index: int = 0) -> FileResponse:
        """Fetch a file of a finished video: number ``index``, from 0, if the request generated several."""
        status = self._get(video_id)["status"]
        if status in _RUNNING_STATES:
            raise RequestError(409, "not_ready", f"video {video_id} is {status}.")
        if status != "completed":
            raise RequestError(404, "not_ready", f"video {video_id} is {status}.")
        files: list[str] = self._records[video_id]["files"]
        if not 0 <= index < len(files) or not (self._folder / files[index]).is_file():
            raise RequestError(404, "not_found", f"video {video_id} has no file {index}.")
        return FileResponse(self._folder / files[index])

    async def delete(self, video_id: str) -> dict[str, Any]:
        """Cancel a video, and delete its files."""
        self._get(video_id)
        if video_id in self._running:
            self._jobs.end(self._running.pop(video_id))
        self._remove(video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}

    async def _finish(self, job: Job, record: dict[str, Any]) -> None:
        try:
            result = await self._jobs.wait(job)
            if job.id_ in self._records:
                record["files"] = [f"{job.id_}{output.suffix}" for output in result.outputs]
                for name, output in zip(record["files"], result.outputs, strict=True):
                    await asyncio.to_thread(write_atomically, self._folder / name, output.data)
                record |= {"size": result.metadata.get("size", record["size"])}
                self._end(record, status="completed", progress=100)
        except RequestError as error:
            self._fail(record, error.code, str(error))
        except OSError as error:
            self._fail(record, "disk", f"the result cannot be written to {self._folder}: {error.strerror}.")
        finally:
            self._running.pop(job.id_, None)
            self._jobs.end(job)
            # Remove the files of a video that was deleted while they were being written.
            if job.id_ not in self._records:
                self._remove(job.id_)

    # A record has the keys of create, and "files", their names in the folder, once the video is completed. A
    # deleted one is no longer in _records, and is not written again.

    def _fail(self, record: dict[str, Any], code: str, message: str) -> None:
        self._end(record, status="failed", error={"code": code, "message": message})

    def _end(self, record: dict[str, Any], **changes: Any) -> None:
        now = int(time.time())
        record |= {"completed_at": now, "expires_at": int(now + 3600 * self._options.keep_hours), **changes}
        if record.get("error") is None:
            logger.info(
                "video %s: completed, %d s after it was requested", record["id"], now - record["created_at"]
            )
        else:
            reason = escape_unprintable(record["error"]["message"])
            logger.warning(
                "video %s: failed, %d s after: %s", record["id"], now - record["created_at"], reason
            )
        if record["id"] in self._records:
            try:
                self._write(record)
            except OSError as error:
                logger.warning("the record of %s cannot be written: %s", record["id"], error.strerror)

    def _write(self, record: dict[str, Any]) -> None:
        write_atomically(self._folder / f"{record['id']}.json", json.dumps(record).encode())

    def _delete_expired(self) -> None:
        now = time.time()
        for id_, record in list(self._records.items()):
            if record["expires_at"] is not None and record["expires_at"] <= now:
                self._remove(id_)

    def _remove(self, id_: str) -> None:
        self._records.pop(id_, None)
        for path in self._folder.glob(f"{id_}[.-]*"):
            path.unlink(missing_ok=True)
