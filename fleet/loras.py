"""LoRAs of requests to a server: each request may name one, and the most recently used ones stay loaded."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

from para_core.adapters.inspect.components import text_encoders_of
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.recipe import Recipe, read_lora
from para_core.fleet.request import Lora

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LoadedLoras:
    """The LoRAs of requests that are loaded into a pipeline, in addition to those of the recipe.

    At most ``keep`` stay loaded: beyond it, the least recently used one is unloaded. ``loads`` counts how often one was
    loaded. ``encoded_prompts`` is cleared when the LoRA changes, if LoRAs are loaded into text encoders.
    """

    def __init__(
        self, pipe: Any, recipe: Recipe, keep: int, encoded_prompts: EncodedPrompts | None = None
    ) -> None:
        self._pipe, self._keep, self._encoded_prompts = pipe, max(1, keep), encoded_prompts
        self._scales_of_recipe = {
            f"lora_{index}": read_lora(text)[1] for index, text in enumerate(recipe.lora)
        }
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._active: Lora | None = None
        self.loads = 0

    def use(self, lora: Lora | None) -> None:
        """Activate ``lora``, loaded if necessary, in addition to the recipe's LoRAs; with None only the recipe's.

        Raises:
            ValueError: ``lora`` cannot be loaded. The previous LoRA then stays active.
        """
        if lora == self._active:
            return
        scales = dict(self._scales_of_recipe)
        if lora is not None:
            scales[self._load(lora)] = lora.scale
        if scales:
            self._pipe.enable_lora()
            self._pipe.set_adapters(list(scales), list(scales.values()))
        else:
            self._pipe.disable_lora()
        self._active = lora
        encoders = text_encoders_of(self._pipe).values()
        if self._encoded_prompts is not None and any(
            getattr(module, "peft_config", None) for module in encoders
        ):
            self._encoded_prompts.clear()

    def _load(self, lora: Lora) -> str:
        if lora.path in self._loaded:
            self._loaded.move_to_end(lora.path)
            return self._loaded[lora.path]
        name = f"request_{self.loads}"
        try:
            with warnings.catch_warnings():
                # peft warns that the model has several LoRAs, which is intended here.
                warnings.simplefilter("ignore")
                self._pipe.load_lora_weights(lora.path, adapter_name=name)
        except Exception as error:
            # A LoRA of another model may raise anything, after a part of it was loaded. Delete that part.
            with contextlib.suppress(Exception):
                self._pipe.delete_adapters(name)
            raise ValueError(
                f"lora {Path(lora.path).name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self.loads += 1
        self._loaded[lora.path] = name
        if len(self._loaded) > self._keep:
            _, oldest = self._loaded.popitem(last=False)
            self._pipe.delete_adapters(oldest)
        return name


class LoraFolder:
    """The LoRAs that requests may name: ``.safetensors`` files in ``folder``, and folders there that contain any.

    The folder is read at each call, so LoRAs can be added while the server runs. ``default`` is the LoRA for requests
    that name none: a name with an optional scale, or None.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.default: str | None = None

    def names(self) -> list[str]:
        """Return the names of all LoRAs in the folder, sorted, without the suffix ``.safetensors``."""
        if not self._folder.is_dir():
            return []
        paths = self._folder.iterdir()
        return sorted(path.name.removesuffix(".safetensors") for path in paths if self._is_lora(path))

    def find(self, text: str) -> Lora:
        """Return the LoRA for a name with an optional scale, such as ``"style:0.8"``.

        Raises:
            ValueError: The folder has no LoRA of this name, or the scale is infinite.
        """
        name, scale = read_lora(text)
        for path in (self._folder / f"{name}.safetensors", self._folder / name):
            if _NAME_PATTERN.fullmatch(name) and self._is_lora(path) and abs(scale) < float("inf"):
                return Lora(str(path.resolve()), scale)
        raise ValueError(
            f"no lora {text[:80]!r} is served; expected one of {', '.join(self.names()) or 'none'}."
        )

    def _is_lora(self, path: Path) -> bool:
        is_file = path.suffix == ".safetensors" and path.is_file()
        return is_file or (path.is_dir() and any(path.glob("*.safetensors")))
