"""The folder of LoRAs that requests may name.

`server.py` makes it and has its routes; `bodies.py` finds the LoRA of a request, which `../loras.py` loads.
Tests: tests/fleet/test_server.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from math import isfinite
from pathlib import Path

from para_core.fleet.recipe import read_lora
from para_core.fleet.request import Lora

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LoraFolder:
    """The LoRAs that requests may name: ``.safetensors`` files in ``folder``, and folders there that contain
    any, whose names have only letters of ASCII, digits, ``.``, ``_`` and ``-``.

    The folder is read at each call, so LoRAs can be added and replaced while the server runs.

    Attributes:
        default: The LoRA for requests that name none: a name with an optional scale, or None.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.default: str | None = None

    def names(self) -> list[str]:
        """Return the names of all LoRAs in the folder, sorted, without the suffix ``.safetensors``."""
        if not self._folder.is_dir():
            return []
        paths = self._folder.iterdir()
        # A set, because a file and a folder may have the same name without the suffix.
        names = {path.name.removesuffix(".safetensors") for path in paths if self._is_lora(path)}
        return sorted(filter(_is_name, names))

    def find(self, text: str) -> Lora:
        """Return the LoRA for a name with an optional scale, such as ``"style:0.8"``.

        Raises:
            ValueError: The folder has no LoRA of this name, or the scale is not finite.
        """
        name, scale = read_lora(text)
        for path in (self._folder / f"{name}.safetensors", self._folder / name):
            if _is_name(name) and self._is_lora(path):
                if not isfinite(scale):
                    raise ValueError(f"lora {text[:80]!r} has the scale {scale}; expected a finite number.")
                return Lora(str(path.resolve()), scale, _version_of(path))
        raise ValueError(
            f"no lora {text[:80]!r} is served; expected one of {', '.join(self.names()) or 'none'}."
        )

    def _is_lora(self, path: Path) -> bool:
        is_file = path.suffix == ".safetensors" and path.is_file()
        return is_file or (path.is_dir() and any(path.glob("*.safetensors")))


def _version_of(path: Path) -> str:
    """Return the size and the time of modification of the file or folder ``path``, and of its LoRA files.

    Only this process reads them, so that all ranks agree on whether the file was replaced.
    """
    versions: list[str] = []
    for file in (path, *sorted(path.glob("*.safetensors"))):
        # A file that is deleted now cannot be loaded, which fails the request.
        with suppress(FileNotFoundError):
            status = file.stat()
            versions.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return ", ".join(versions)


def _is_name(name: str) -> bool:
    """Whether requests may name a LoRA ``name``: not "none", by which a request asks for no LoRA."""
    # The pattern admits no path separator, so no client can name a file outside of the folder.
    return name != "none" and _NAME_PATTERN.fullmatch(name) is not None
