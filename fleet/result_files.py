"""Files of results on disk: their names and digests, checks of free space, and atomic writing.

``para_core generate`` chooses names and writes (`cli/generation.py`). The server writes only the results of
asynchronous videos (`http/videos.py`). `outputs.py` encodes what is written here. Tests:
tests/cli/test_generate.py, tests/fleet/test_openai.py, tests/same_bits/test_command.py.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from para_core.fleet.outputs import Result
from para_core.fleet.pipeline_info import OutputKind, PipelineInfo
from para_core.fleet.prompt_file import Line
from para_core.fleet.request import Request, estimate_pixels
from para_core.progress import readable_bytes

if TYPE_CHECKING:
    from para_core.fleet.recipe import Recipe

# Upper estimates of bytes per pixel. A PNG of noise has slightly more than 3. Of the video formats, GIF is
# the largest.
_BYTES_PER_PIXEL = {"png": 3.1, "jpg": 3.0, "webp": 3.0, "mp4": 1.0, "gif": 1.5}
_SPARE_BYTES = 64 * 2**20  # of disk space that stay free beside the estimate
_TEMPORARY_BYTES = 4  # of randomness in the name of a temporary file, which has two characters for each
# A valid beginning of a file name: no folder, and no character that a file system refuses.
_NAME_PATTERN = re.compile(r"[^\W.][^\\/:*?\"<>|\x00-\x1f\x7f]*")
# Bytes of such a beginning. File systems take names of 255; a number, a suffix and what makes the name of a
# temporary file follow.
_MOST_NAME_BYTES = 200


def find_disk_problem(folder: Path, request: Request, model: PipelineInfo) -> str | None:
    """Return an error message if the result of ``request`` alone may not fit on the disk of ``folder``, else
    None.

    It is None for a small result as well: if the disk is so full, :func:`require_room` refuses all lines
    together.
    """
    needed = _estimate_bytes([request], model)
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if needed + _SPARE_BYTES <= free or needed <= _SPARE_BYTES:
        return None
    return f"its result may take {readable_bytes(needed)}, and {folder} has {readable_bytes(free)} free."


def _estimate_bytes(requests: Sequence[Request], model: PipelineInfo) -> int:
    return int(
        sum(
            estimate_pixels(request, model) * _BYTES_PER_PIXEL[request.delivery.format_]
            for request in requests
        )
    )


def require_room(folder: Path, requests: Sequence[Request], model: PipelineInfo) -> int:
    """Make the folder, and return an upper estimate of the bytes that the results of ``requests`` take.

    Raises:
        OSError: The folder cannot be made or written to, or its disk has too little free space.
    """
    needed = _estimate_bytes(requests, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"results cannot be written to {folder}: {error.strerror}. Use another folder with --out."
        ) from error
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise OSError(
            f"{folder} has {readable_bytes(free)} free, and {len(requests)} results may take {readable_bytes(needed)} "
            f"(with {readable_bytes(_SPARE_BYTES)} to spare). Use a folder on another disk with --out, or generate "
            "fewer at once."
        )
    return needed


def require_file(path: Path | None) -> None:
    """Check that a file can be written at ``path``, unless it is None. An existing file is not changed.

    Raises:
        OSError: No file can be written there.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}. Use another file.") from error


def require_name(name: str | None) -> None:
    """Check that ``name`` is a valid beginning of a file name. None is valid.

    Raises:
        ValueError: ``name`` is no such beginning, for example because it names a folder.
    """
    if name is None:
        return
    if not _NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"name is {name!r}; expected the beginning of a file name, such as 'cat', without a folder."
        )
    num_bytes = len(os.fsencode(name))
    if num_bytes > _MOST_NAME_BYTES:
        raise ValueError(f"name has {num_bytes} bytes; expected at most {_MOST_NAME_BYTES}: {name!r:.40}…")


def compute_digest(request: Request, recipe: Recipe, kind: OutputKind) -> str:
    """Return a string that is equal for results with equal files: digests of request and recipe, format,
    frame rate.
    """
    parts = [request.digest, recipe.digest, request.delivery.format_]
    if kind == "video":
        parts.append(f"{request.delivery.fps} fps")
    return " ".join(parts)


def choose_names(folder: Path, lines: Sequence[Line], name: str | None) -> tuple[list[Line], list[Line]]:
    """Return the lines to generate and the finished lines, each with the name of its files.

    A line is finished if the folder has a complete result with its digest. Of several lines with the same
    digest, each needs a result of its own. A line to generate is named by its number (``cat-00001`` if
    ``name`` is ``cat``), or by an unused number if the folder already has files of that name.

    Every line must have its digest: an empty one would equal that of an incomplete result.
    """
    prefix = ""
    if name is not None:
        prefix = f"{name}-"
    pattern = re.compile(re.escape(prefix) + r"(\d{5,})(-\d+)?\.\w+")
    files: list[str] = []
    if folder.is_dir():
        files = [path.name for path in folder.iterdir()]
    taken = {int(match[1]) for match in map(pattern.fullmatch, files) if match}
    results: dict[str, list[int]] = {}
    for number in sorted(taken, reverse=True):
        results.setdefault(read_digest(folder, f"{prefix}{number:05d}"), []).append(number)
    unfinished: list[Line] = []
    finished: list[Line] = []
    for line in lines:
        numbers = results.get(line.digest)
        if numbers:
            finished.append(replace(line, name=f"{prefix}{numbers.pop():05d}"))
        else:
            unfinished.append(line)
    # Unused numbers are larger than those of all files and of all lines, so that no two lines get the same
    # number.
    unused = count(1 + max([*taken, *(line.number for line in unfinished)], default=0))
    named: list[Line] = []
    for line in unfinished:
        number = line.number
        if number in taken:
            number = next(unused)
        named.append(replace(line, name=f"{prefix}{number:05d}"))
    return named, finished


def read_digest(folder: Path, name: str) -> str:
    """Return the digest of the result ``name`` in ``folder``, or an empty string if the result is not
    complete.
    """
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        if all((folder / file).is_file() for file in record["files"]):
            return str(record["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # A record that is missing or damaged is not complete.
    return ""


def write_result(folder: Path, line: Line, result: Result) -> None:
    """Write the files of the line's result, and a record of its metadata with the line's number and digest.

    The line has the name of :func:`choose_names`, and the folder exists (:func:`require_room`).
    The record is ``line.name.json``, which is written last: if it exists, the other files are complete. It
    has the SHA-256 of each file's pixels. A PNG also has the record inside, in its text chunks ``prompt`` and
    ``para_core`` (JSON).

    Raises:
        FileExistsError: One of the files exists. Nothing is written then.
    """
    paths = [folder / f"{line.name}{output.suffix}" for output in result.outputs]
    record_path = folder / f"{line.name}.json"
    for path in (*paths, record_path):
        if path.exists():
            raise FileExistsError(f"{path} exists, and is not overwritten. Use another --name or --out.")
    numbers = {"line": line.number, "digest": line.digest}
    record = {
        **numbers,
        **result.metadata,
        "files": [path.name for path in paths],
        "pixels sha256": [output.pixels_sha256 for output in result.outputs],
    }
    text = json.dumps(record, indent=2) + "\n"
    prompt = result.metadata.get("request", {}).get("prompt") or ""
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False)
    for path, output in zip(paths, result.outputs, strict=True):
        data = output.data
        if path.suffix == ".png":
            data = _add_texts(data, prompt=prompt, para_core=text)
        write_atomically(path, data)
    write_atomically(record_path, text.encode())


def _add_texts(png: bytes, **texts: str) -> bytes:
    """Return the PNG file ``png`` with text chunks added, by their keywords. The pixels stay as they are."""
    from PIL.PngImagePlugin import PngInfo, putchunk

    info = PngInfo()
    for name, text in texts.items():
        info.add_itxt(name, text)
    # A PNG file begins with 33 bytes of signature and header chunk (IHDR), which the text chunks must follow.
    header = 33
    file = io.BytesIO()
    file.write(png[:header])
    for kind, data, *_ in info.chunks:
        putchunk(file, kind, data)
    return file.getvalue() + png[header:]


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, so that a crash at any moment leaves either the old or the new contents."""
    # Not by mkstemp, whose files only their owner may read: the umask, which any new file has, can be read
    # only by setting it, for all threads.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TEMPORARY_BYTES)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def delete_temporary_files(folder: Path, name: str) -> None:
    """Delete what a killed process has left of :func:`write_atomically` in a folder of results.

    ``name`` is a regular expression of the results' names, without suffix. No other process may be writing
    such results there.
    """
    formats = "|".join(("json", *_BYTES_PER_PIXEL))
    pattern = re.compile(rf"\.{name}(-\d+)?\.({formats})\.\w{{{2 * _TEMPORARY_BYTES}}}")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` inside this context against other commands of this machine. Delete the leftover
    temporary files of ``para_core generate``.

    On a file system without locks, nothing is locked and nothing deleted.

    Raises:
        RuntimeError: Another process holds the lock.
    """
    import fcntl

    # The folder itself is locked, so that no lock file can be left behind. The lock ends with the process.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another para_core writes to {folder}: wait for it, or use another folder with --out."
            ) from None
        except OSError:
            pass  # The file system has no locks, so the files may be those of a process that is writing.
        else:
            delete_temporary_files(folder, r"(.+-)?\d{5,}")  # names of choose_names
        yield
    finally:
        os.close(descriptor)
