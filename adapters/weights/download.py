"""The folder of a pipeline: one that is there, or of a repository on the Hub, which one rank of each node downloads
while the others wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from para_core.distributed.consistency import check_consistent, exchange, signature
from para_core.distributed.mesh import GuidedMesh

# Between two signs of life, in seconds: a download may take longer than a group waits for a rank.
_INTERVAL = 1.0
_WAITING = signature({"waiting for": "a download"})


def download_once_per_node(pipeline: Any, name: str | Path, mesh: GuidedMesh, options: Mapping[str, Any]) -> None:
    """Download ``name`` if it is no folder, on one rank of those that have a cache in common. Every rank of ``mesh``
    calls it.

    Args:
        pipeline: a class of diffusers.
        name: a folder, or a repository on the Hub.
        options: of ``pipeline.download``.

    Raises:
        RuntimeError: on every rank, if one could not download it.
    """
    wanted = not Path(name).is_dir() and not options.get("local_files_only", False)
    node = {"host": socket.gethostname(), "cache": _cache_of(options)}
    asking = [place if place["wanted"] else None for place in exchange({**node, "wanted": wanted}, mesh)]
    first = wanted and asking.index({**node, "wanted": True}) == mesh.rank
    pending = _started(lambda: pipeline.download(str(name), **options)) if first else None
    _wait_for_all(pending, name, mesh)


def folder_of(pipeline: Any, name: str | Path, options: Mapping[str, Any]) -> Path:
    """Return the folder of the downloaded files of ``name``, without asking the Hub, which may have newer ones."""
    if Path(name).is_dir():
        return Path(name)
    return Path(pipeline.download(str(name), **{**options, "local_files_only": True, "force_download": False}))


def _cache_of(options: Mapping[str, Any]) -> str:
    from huggingface_hub import constants

    return str(options.get("cache_dir") or constants.HF_HUB_CACHE)


def _started(download: Callable[[], Any]) -> Future[Any]:
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(download())
        except BaseException as error:  # whatever it is, ranks wait for it
            found.set_exception(error)

    # A daemon, for who interrupts the program would otherwise wait for it.
    Thread(target=run, name="para_core: download", daemon=True).start()
    return found


def _wait_for_all(pending: Future[Any] | None, name: str | Path, mesh: GuidedMesh) -> None:
    """Until no rank downloads any more; raises on all of them if one cannot."""
    while True:
        done = pending is None or bool(wait([pending], timeout=_INTERVAL).done)
        problem = pending.exception() if done and pending is not None else None
        if problem is not None:
            check_consistent(
                RuntimeError(
                    f"{name} is no folder here, and could not be downloaded: {type(problem).__name__}: {problem}. "
                    "Without a connection, download "
                    "it before on each node, and give the folder, or local_files_only=True."
                ),
                mesh,
            )
        if all(done for (done,) in check_consistent(_WAITING, mesh, extras=(int(done),))):
            return
