"""The safetensors files of a pipeline's folder, and weights that are memory-mapped from them, each by itself.

Only ``load_sharded.py`` calls it, between the download and the sharding. What the caller passes to
``from_pretrained`` is not loaded from the folder, so every function leaves it alone. Tests:
tests/weights/test_load.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

# Maps the names of dtypes in the header of a safetensors file to dtypes of PyTorch.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Number of bytes at each end of a weight that are compared with the file, to see whether the loader changed
# the weight: one memory page of most hosts, because reading a byte makes the whole page resident.
_END = 4096


def component_folders(folder: Path, passed: Collection[str]) -> list[Path]:
    """Return the folders of components that ``from_pretrained`` loads from ``folder``.

    It loads neither ``passed``, which the caller gives as keyword arguments, nor folders that the pipeline's
    index does not name.
    """
    index = folder / "model_index.json"
    if not index.exists():
        # from_pretrained says so, in words of its own.
        return []
    entries = json.loads(index.read_text())
    names = sorted(
        name for name, entry in entries.items() if isinstance(entry, list) and entry[0] is not None
    )
    return [folder / name for name in names if name not in passed]


def check_safetensors(folders: Sequence[Path]) -> None:
    """Raise ``FileNotFoundError`` if a model in ``folders`` lacks safetensors files, or the index of several
    such files.

    Without this check diffusers and transformers try other formats, and their error names a file of these
    formats.
    """
    for part in folders:
        config = part / "config.json"
        if not config.exists():
            continue
        # The config of a model has one of these entries. Other components, such as tokenizers, have neither.
        if not json.loads(config.read_text()).keys() & {"_class_name", "architectures"}:
            continue
        names = sorted(path.name for path in part.glob("*.safetensors"))
        if not names:
            others = sorted(
                path.name for path in part.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            )
            way_out = "Download it again."
            if others:
                way_out = f"It has {others[0]}: save it again, Pipeline.from_pretrained(...).save_pretrained(folder)."
            raise FileNotFoundError(f"{part} has no safetensors file. {way_out}")
        if any(re.search(r"-\d+-of-\d+", name) for name in names) and not list(
            part.glob("*.safetensors.index*.json")
        ):
            raise FileNotFoundError(
                f"{part} has {names[0]} and others, and no index of them (*.safetensors.index.json). Download it again."
            )


def files_in(folders: Sequence[Path], variant: str | None) -> list[Path]:
    """Return the safetensors files in ``folders``, of each those of ``variant`` if there are any, or those
    without one.
    """
    files = []
    for folder in folders:
        by_variant: dict[str | None, list[Path]] = {}
        # Paths are not resolved: in the Hub's cache they are links to blobs, whose names tell neither part
        # nor variant.
        for path in sorted(folder.glob("*.safetensors")):
            # The variant is the part after the first dot: "fp16" in
            # diffusion_pytorch_model.fp16-00001-of-00002.safetensors.
            parts = path.name.split(".")
            which = None
            if len(parts) > 2:
                which = parts[1].split("-")[0]
            by_variant.setdefault(which, []).append(path)
        files += by_variant.get(variant) or by_variant.get(None) or []
    return files


def dtypes_of(files: Sequence[Path]) -> dict[str, torch.dtype]:
    """Return the most common floating-point dtype of each component's weights; float32 under the key
    ``"default"``.

    ``from_pretrained`` maps weights of the requested dtype from the file and copies the others.
    """
    from safetensors import safe_open

    counted: dict[str, Counter[torch.dtype]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  it is not a dict
                kind = _DTYPES.get(file.get_slice(key).get_dtype())
                if kind is not None:
                    counted.setdefault(path.parent.name, Counter())[kind] += 1
    return {**{name: kinds.most_common(1)[0][0] for name, kinds in counted.items()}, "default": torch.float32}


def map_each_weight(component: nn.Module, path: Path) -> None:
    """Replace each weight of ``component`` by a separate memory mapping of the file ``path``.

    diffusers and transformers map each file once, so all pages read from it stay resident until the last
    weight of the file is sharded. A separate mapping, with the pages read from it, is freed with its weight.
    Weights that the loader renamed keep the mapping that they have, and so do those that it changed: their
    dtype, shape, strides or their first or last ``_END`` bytes differ from the file.
    """
    from safetensors import safe_open

    parameters = dict(component.named_parameters(remove_duplicate=False))
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key in parameters]  # noqa: SIM118  it is not a dict
    for name in names:
        with safe_open(path, framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
        x = parameters[name].data
        same_layout = (x.dtype, x.shape, x.stride()) == (weight.dtype, weight.shape, weight.stride())
        if not x.is_meta and same_layout and weight.is_contiguous():
            before, mapped = (tensor.view(-1).view(torch.uint8) for tensor in (x, weight))
            if torch.equal(before[:_END], mapped[:_END]) and torch.equal(before[-_END:], mapped[-_END:]):
                parameters[name].data = weight


@contextmanager
def uninitialized_memory() -> Iterator[None]:
    """Turn off ``torch.utils.deterministic.fill_uninitialized_memory`` inside the ``with`` block.

    Loading allocates each weight with ``torch.empty`` before it moves it to the meta device. Filling that
    memory would make its pages resident, and malloc may keep them.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
