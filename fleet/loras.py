"""LoRAs of requests: each request may have one, and the most recently used ones stay loaded.

:meth:`para_core.fleet.rank.Rank.generate_batch` calls it before each batch of a server. The LoRAs of the
recipe are loaded by `build.py`, under the names ``lora_0``, ``lora_1``, …; `http/lora_folder.py` finds the
file of a name. Tests: tests/fleet/test_rank.py.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

from para_core.adapters.inspect.components import text_encoders_of
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.recipe import Recipe, read_lora
from para_core.fleet.request import Lora


class LoadedLoras:
    """The LoRAs of requests that are loaded into a pipeline, in addition to those of the recipe.

    At most ``keep`` stay loaded: beyond it, the least recently used one is unloaded. ``encoded_prompts`` is
    cleared when the LoRA changes, if LoRAs are loaded into text encoders. All ranks must make the same calls
    of :meth:`use`.

    Attributes:
        loads: How often a LoRA was loaded.
    """

    def __init__(
        self, pipe: Any, recipe: Recipe, keep: int, encoded_prompts: EncodedPrompts | None = None
    ) -> None:
        self._pipe, self._keep, self._encoded_prompts = pipe, max(1, keep), encoded_prompts
        # The names are those by which build.py has loaded them.
        self._scales_of_recipe = {
            f"lora_{index}": read_lora(text)[1] for index, text in enumerate(recipe.lora)
        }
        # Names in the pipeline by path, the least recently used first.
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._active: Lora | None = None
        self._numbers = itertools.count()
        self.loads = 0

    def use(self, lora: Lora | None) -> None:
        """Activate ``lora``, loaded if necessary, in addition to the recipe's LoRAs; with None only the
        recipe's.

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
        """Return the name under which the pipeline has the LoRA, after loading it if necessary."""
        if lora.path in self._loaded:
            self._loaded.move_to_end(lora.path)
            return self._loaded[lora.path]
        # No name is used twice: a LoRA that failed half-way may leave its name behind.
        name = f"request_{next(self._numbers)}"
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
