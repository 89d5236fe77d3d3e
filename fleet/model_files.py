"""The files of a model: the index of its components, and single files of weights. Imports no torch.

A model is a folder or Hub repository with ``model_index.json`` (a classical pipeline) or
``modular_model_index.json``, or a single file of weights, whose configs are in such a folder.

Which class loads it is chosen in `selection.py`, and `classical.py` and `modular.py` load it. Tests:
tests/fleet/test_model_files.py.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

CLASSICAL, MODULAR = "model_index.json", "modular_model_index.json"
SAFETENSORS, GGUF = ".safetensors", ".gguf"
# Suffixes of other files of weights. They are pickles, which may run code when they are read.
_PICKLES = (".ckpt", ".pt", ".pth", ".bin")
# Prefixes of the weights of text encoders in single files, by the beginning of their class names.
ENCODER_WEIGHTS = {
    "CLIPText": ("cond_stage_model.", "conditioner.", "text_encoders.clip"),
    "T5": ("text_encoders.t5",),
}
# Prefixes of weights that only a checkpoint of a whole pipeline has: those of VAEs and of text encoders.
_PREFIXES_OF_PIPELINES = ("first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.")
# Part of the names of weights that only a LoRA has: those of diffusers and peft (also older ones:
# to_q_lora.down), of kohya-ss, XLabs (proj_lora1.down) and LyCORIS.
_LORA = re.compile(r"(^|[._])(lora|lycoris|lokr|hada)(_|\d*\.)")
# Bytes of the header of a safetensors file. A file of another kind has a random length there, which must not
# be read.
_LARGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class Index:
    """The index of a folder or repository: which pipeline class it is for, and the classes of its components."""

    modular: bool
    content: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        """Name of the pipeline class, "None" if the index has none."""
        return str(self.content.get("_class_name"))


def home_of(model: str, config: str | None) -> str:
    """Return the folder or repository with the configs of ``model``: ``config`` for a single file, else
    ``model``.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is of another kind or lacks ``config``, or ``config`` is given for a model that
            is no file.
    """
    path = Path(model)
    # The suffix tells a file that does not exist from a repository.
    is_file = path.is_file() or path.suffix in (SAFETENSORS, GGUF, *_PICKLES)
    if not is_file or path.is_dir():
        if config is not None:
            raise ValueError(
                f"config is {config!r}, and model {model!r} is no single file: a folder or repository has its own "
                "configs. Leave --config out."
            )
        return model
    if path.suffix not in (SAFETENSORS, GGUF):
        raise ValueError(
            f"model is {model!r}; expected a single file in .safetensors or .gguf, a folder, or a repository on the "
            "Hub. Convert other files, such as pickles, with diffusers."
        )
    if not path.is_file():
        raise FileNotFoundError(f"model file {model!r} does not exist.")
    if config is None:
        raise ValueError(
            f"model is {model!r}, one file of weights without configs; expected --config with a folder or Hub "
            "repository of the same model, such as --config black-forest-labs/FLUX.1-dev."
        )
    return config


def is_single_file(model: str) -> bool:
    """Whether ``model``, which :func:`home_of` accepted, is a single file."""
    return Path(model).is_file()


def read_index(name: str, *, subject: str = "model") -> Index:
    """Return the index of a folder or Hub repository.

    ``subject`` says in the message what ``name`` is.

    Raises:
        FileNotFoundError: The folder or repository has no index, or cannot be reached.
    """
    for file in (CLASSICAL, MODULAR):
        content = _find(name, file, subject)
        if content is not None:
            return Index(file == MODULAR, content)
    raise FileNotFoundError(
        f"{subject} {name!r} has no readable {CLASSICAL} or {MODULAR}; expected a folder written by "
        "save_pretrained, or a diffusers repository on the Hub."
    )


def read_config(name: str, subfolder: str = "", *, subject: str = "model") -> Mapping[str, Any]:
    """Return the ``config.json`` of a component in a folder or Hub repository.

    ``subject`` says in the message what ``name`` is.

    Raises:
        FileNotFoundError: There is no such file.
    """
    file = "config.json"
    if subfolder:
        file = f"{subfolder}/config.json"
    content = _find(name, file, subject)
    if content is None:
        raise FileNotFoundError(
            f"{subject} {name!r} has no readable {file}; expected a folder written by save_pretrained, or a "
            "repository on the Hub."
        )
    return content


def _find(name: str, file: str, subject: str) -> Mapping[str, Any] | None:
    """Return the JSON object in ``file`` of a folder or Hub repository; None if it has no such file.

    A ``name`` that is no folder here is taken for a repository, from which the file is downloaded.

    Raise FileNotFoundError if there is neither, or the file is no JSON object.
    """
    if Path(name).is_dir():
        path = Path(name) / file
        if not path.is_file():
            return None
    else:
        downloaded = _download(name, file, subject)
        if downloaded is None:
            return None
        path = downloaded
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{subject} {name!r} has no readable {file}: {error}") from error
    if not isinstance(content, dict):
        raise FileNotFoundError(f"{subject} {name!r} has no readable {file}: expected a JSON object.")
    return content


def _download(name: str, file: str, subject: str) -> Path | None:
    """Return the path of a file of a Hub repository, downloaded if necessary; None if the repository has no
    such file. If the Hub cannot be reached, the cache is taken for the repository.

    Raise FileNotFoundError if ``name`` cannot be a repository, or the repository cannot be reached.
    """
    owner, slash, repository = name.partition("/")
    if not slash or not owner or not repository or "/" in repository or name.startswith((".", "~")):
        wanted = file
        if file in (CLASSICAL, MODULAR):
            wanted = f"{CLASSICAL} or {MODULAR}"
        single = ""
        if subject == "model":
            single = "a .safetensors or .gguf file, "
        raise FileNotFoundError(
            f"{subject} {name!r} does not exist here; expected a folder with a {wanted} in it, {single}or owner/name "
            "of a repository on the Hub."
        )
    try:
        return _download_once(name, file)
    except Exception as error:
        # An invalid name, a missing or gated repository, or the network: the Hub's client has a class for
        # each.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileNotFoundError(
            f"{subject} {name!r} has no readable {file}: it is no folder here, and no repository that can be reached "
            f"on the Hub ({reason})"
        ) from error


@cache
def _download_once(name: str, file: str) -> Path | None:
    """Do the same as :func:`_download`, and raise what the client of the Hub raises.

    The result is kept for the process, because the client asks the Hub each time whether the file has
    changed.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except LocalEntryNotFoundError:  # a kind of EntryNotFoundError for a Hub that cannot be reached
        if file == CLASSICAL and isinstance(try_to_load_from_cache(name, MODULAR), str):
            # Only the cache can say which index the repository has: a modular one.
            return None
        raise
    except EntryNotFoundError:
        return None


SingleFile = Literal["pipeline", "denoiser"]


def kind_of_file(path: str) -> SingleFile:
    """Return whether a single file has the weights of a whole pipeline or of its denoiser (a transformer or
    UNet) alone.

    Only the header of a .safetensors file is read. Every .gguf file is taken for a denoiser.

    Raises:
        ValueError: The header of the file is damaged, or the file has the weights of a LoRA.
    """
    if Path(path).suffix == GGUF:
        with Path(path).open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(
                    f"model {path!r} is no GGUF file: it does not begin with 'GGUF'. Download it again."
                )
        return "denoiser"
    names = weight_names(path)
    if not names:
        raise ValueError(f"model {path!r} is a safetensors file with no weights. Download it again.")
    if any(_LORA.search(name) for name in names):
        raise ValueError(
            f"model {path!r} has the weights of a LoRA. Give it as --lora, and its base as --model."
        )
    if any(name.startswith(_PREFIXES_OF_PIPELINES) for name in names):
        return "pipeline"
    return "denoiser"


def weight_names(path: str) -> list[str]:
    """Return the names of the weights in the header of a safetensors file: an 8-byte length, then that many
    bytes of JSON.

    Raises:
        ValueError: The header is damaged.
    """
    try:
        with Path(path).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(file.read(length))
        return [str(name) for name in header if name != "__metadata__"]
    except (struct.error, ValueError, TypeError) as error:
        raise ValueError(f"model {path!r} is no safetensors file: {error}. Download it again.") from error
