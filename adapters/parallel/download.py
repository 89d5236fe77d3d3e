"""Download a pipeline on one rank of each node, while the others wait.

Only ``load_sharded.py`` calls it. Tests: tests/weights/test_load.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from para_core.distributed.agree import agree, exchange, together
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.records import Record

# Seconds between two exchanges of the ranks while one downloads. A download may take longer than the time-out
# of the process group, so a single collective at its end would fail.
_INTERVAL = 1.0
# The record that all ranks bring to each of these exchanges.
_WAITING: Record = {"waiting for": "a download"}


def download_once_per_node(
    pipeline: Any, name: str | Path, mesh: GuidedMesh, options: Mapping[str, Any]
) -> None:
    """Download ``name`` on one rank of each node, and wait until all downloads are complete.

    A collective call: all ranks of ``mesh`` raise if a download fails. Nothing is downloaded if ``name`` is a
    local folder or ``options`` have ``local_files_only``. They are the keyword arguments of
    ``pipeline.from_pretrained``; a component among them, such as ``vae=``, is not downloaded.

    Ranks are on one node if the names of their hosts and the paths of their cache folders are equal. This
    assumes that such ranks share the folder: containers with equal host names, but with folders of their own,
    would find nothing in the folder of a rank that downloaded nothing.
    """
    with together(mesh, f"{name} could not be looked up"):
        wanted = not Path(name).is_dir() and not options.get("local_files_only", False)
        node = {"host": socket.gethostname(), "cache": _hub_cache_of(options)}
    # The index of a record is the rank that brought it.
    records = exchange({**node, "wanted": wanted}, mesh)
    first = wanted and records.index({**node, "wanted": True}) == mesh.rank
    pending = None
    if first:
        pending = _start_download(lambda: pipeline.download(str(name), **options))
    while True:
        # A rank that downloads nothing does not wait here, but in agree(), for those that download.
        complete = pending is None or bool(wait([pending], timeout=_INTERVAL).done)
        problem = None
        if complete and pending is not None:
            problem = pending.exception()
        record: Record | Exception = _WAITING
        if problem is not None:
            record = RuntimeError(
                f"{name} is no folder here, and could not be downloaded: {type(problem).__name__}: {problem}. "
                "Without a connection, download it before on each node, and give the folder, or local_files_only=True."
            )
        if all(number for (number,) in agree(record, mesh, [int(complete)])):
            return


def folder_of(pipeline: Any, name: str | Path, options: Mapping[str, Any]) -> Path:
    """Return the folder ``name``, or the one in which its files are cached.

    Never contacts the Hub: its files may be newer than those that another rank has just downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    return Path(
        pipeline.download(str(name), **{**options, "local_files_only": True, "force_download": False})
    )


def _hub_cache_of(options: Mapping[str, Any]) -> str:
    from huggingface_hub import constants

    return str(options.get("cache_dir") or constants.HF_HUB_CACHE)


def _start_download(download: Callable[[], Any]) -> Future[Any]:
    """Call ``download`` in a thread, and return the future of its result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(download())
        except BaseException as error:  # Other ranks wait for this result, so every failure must be reported.
            future.set_exception(error)

    # Use a daemon thread: an interrupted program would otherwise wait for the download before it exits.
    Thread(target=run, name="para_core: download", daemon=True).start()
    return future
