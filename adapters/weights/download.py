"""Find the folder of a pipeline's files. One rank of each node downloads it from the Hub while the others wait."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from para_core.distributed.consistency import check_consistent, exchange, raising_on_all, signature
from para_core.distributed.mesh import GuidedMesh

# Seconds between two exchanges of the waiting ranks. A download may take longer than the time-out of the process group,
# so a single collective at its end would fail.
_INTERVAL = 1.0
_WAITING = signature({"waiting for": "a download"})


def download_once_per_node(pipeline: Any, name: str | Path, mesh: GuidedMesh, options: Mapping[str, Any]) -> None:
    """Download ``name`` on one rank per host and cache folder. Returns on all ranks when all downloads are complete.

    Every rank of ``mesh`` must call this function. Nothing is downloaded if ``name`` is a local folder or
    ``local_files_only`` is set.

    Args:
        pipeline: A pipeline class of diffusers.
        name: A local folder, or the name of a repository on the Hub.
        mesh: The ranks that load the pipeline.
        options: Keyword arguments of ``pipeline.download``.

    Raises:
        RuntimeError: On every rank, if a download failed on any rank.
    """
    with raising_on_all(mesh, f"{name} could not be looked up"):
        wanted = not Path(name).is_dir() and not options.get("local_files_only", False)
        node = {"host": socket.gethostname(), "cache": _cache_of(options)}
    asking = [record if record["wanted"] else None for record in exchange({**node, "wanted": wanted}, mesh)]
    first = wanted and asking.index({**node, "wanted": True}) == mesh.rank
    pending = _started(lambda: pipeline.download(str(name), **options)) if first else None
    _wait_for_all(pending, name, mesh)


def folder_of(pipeline: Any, name: str | Path, options: Mapping[str, Any]) -> Path:
    """Return the local folder of ``name``: the folder itself, or the cached files of a repository on the Hub.

    Never contacts the Hub, which may have newer files than those that were downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    return Path(pipeline.download(str(name), **{**options, "local_files_only": True, "force_download": False}))


def _cache_of(options: Mapping[str, Any]) -> str:
    from huggingface_hub import constants

    return str(options.get("cache_dir") or constants.HF_HUB_CACHE)


def _started(download: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(download())
        except BaseException as error:  # Other ranks wait for this result, so every failure must be reported.
            future.set_exception(error)

    # Use a daemon thread: an interrupted program would otherwise wait for the download before it exits.
    Thread(target=run, name="para_core: download", daemon=True).start()
    return future


def _wait_for_all(pending: Future[Any] | None, name: str | Path, mesh: GuidedMesh) -> None:
    """Wait until the downloads of all ranks are complete. Raise ``RuntimeError`` on all ranks if one fails."""
    while True:
        done = pending is None or bool(wait([pending], timeout=_INTERVAL).done)
        problem = pending.exception() if done and pending is not None else None
        if problem is not None:
            check_consistent(
                RuntimeError(
                    f"{name} is no folder here, and could not be downloaded: {type(problem).__name__}: {problem}. "
                    "Without a connection, download it before on each node, and give the folder, or "
                    "local_files_only=True."
                ),
                mesh,
            )
        if all(done for (done,) in check_consistent(_WAITING, mesh, extras=(int(done),))):
            return
