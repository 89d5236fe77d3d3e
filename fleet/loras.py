"""LoRAs of a pipeline that serves: each request may name one, and the most recently used stay loaded."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.adapters.weights.text_encoders import text_encoders_of
from para_core.fleet.recipe import Recipe, read_lora

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Lora(NamedTuple):
    """A LoRA of a request: a file or folder, and its scale."""

    path: str
    scale: float = 1.0


class LoadedLoras:
    """LoRAs of one pipeline. A request's LoRA joins those of the recipe, and is loaded when it is first used.

    Args:
        keep (`int`): LoRAs that stay loaded. The least recently used one is unloaded.
        encoded_prompts (`EncodedPrompts`, *optional*): Cleared if a LoRA changes text encoders.

    Attributes:
        loads: Number of LoRAs that were loaded.
    """

    def __init__(self, pipe: Any, recipe: Recipe, keep: int, encoded_prompts: EncodedPrompts | None = None) -> None:
        self._pipe, self._keep, self._encoded_prompts = pipe, max(1, keep), encoded_prompts
        self._scales_of_recipe = {f"lora_{index}": read_lora(text)[1] for index, text in enumerate(recipe.lora)}
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._active: Lora | None = None
        self.loads = 0

    def use(self, lora: Lora | None) -> None:
        """Make ``lora`` the only LoRA besides those of the recipe. None uses those of the recipe only.

        Raises:
            ValueError: If it cannot be loaded. The LoRA before stays in use.
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
        if self._encoded_prompts is not None and any(getattr(module, "peft_config", None) for module in encoders):
            self._encoded_prompts.clear()

    def _load(self, lora: Lora) -> str:
        if lora.path in self._loaded:
            self._loaded.move_to_end(lora.path)
            return self._loaded[lora.path]
        name = f"request_{self.loads}"
        try:
            with warnings.catch_warnings():
                # peft warns that the model has several LoRAs.
                warnings.simplefilter("ignore")
                self._pipe.load_lora_weights(lora.path, adapter_name=name)
        except Exception as error:
            # A file of another model may raise anything, after it was loaded in part.
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
    """LoRAs that requests may name: files and folders in ``folder``. Those that are added while serving count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.default: str | None = None

    def names(self) -> list[str]:
        """Return the names of the LoRAs, sorted."""
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(
            path.stem if path.suffix == ".safetensors" else path.name for path in paths if self._is_lora(path)
        )

    def find(self, text: str) -> Lora:
        """Return the LoRA of a name with an optional scale, such as ``"style:0.8"``.

        Raises:
            ValueError: If there is none.
        """
        name, scale = read_lora(text)
        for path in (self._folder / f"{name}.safetensors", self._folder / name):
            if _NAME.fullmatch(name) and self._is_lora(path) and abs(scale) < float("inf"):
                return Lora(str(path.resolve()), scale)
        raise ValueError(f"no lora {text[:80]!r} is served; expected one of {', '.join(self.names()) or 'none'}.")

    def set_default(self, text: str | None) -> None:
        """Set the LoRA of requests that name none.

        Raises:
            ValueError: If there is none of this name.
        """
        if text is not None:
            self.find(text)
        self.default = text

    def _is_lora(self, path: Path) -> bool:
        is_file = path.suffix == ".safetensors" and path.is_file()
        return is_file or (path.is_dir() and any(path.glob("*.safetensors")))
