"""LoRAs of requests: each request may have one, and the most recently used ones stay loaded.

:meth:`para_core.fleet.rank.Rank.generate_batch` calls it before each batch of a server. The LoRAs of the
recipe are loaded by `build.py` with :func:`load_lora`, under the names ``lora_0``, ``lora_1``, …;
`http/lora_folder.py` finds the file of a name. Tests: tests/fleet/test_rank.py.
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
from para_core.instance.private_class import original_class


def load_lora(pipe: Any, path: str, name: str, label: str) -> None:
    """Load the LoRA at ``path``, a file, folder or repository, into ``pipe`` under ``name``.

    Raises:
        ValueError: It cannot be loaded, for example because it is one of another model. The message calls it
            ``label``, and ``pipe`` keeps no part of it.
    """
    try:
        pipe.load_lora_weights(path, adapter_name=name)
        # If no weights in the file belong to a component, diffusers only logs that.
        if not any(name in names for names in pipe.get_list_adapters().values()):
            raise ValueError(f"it has no weights for {original_class(pipe).__name__}")
    except Exception as error:
        # A LoRA of another model, or an unreachable Hub, may raise anything, after a part was loaded. Delete
        # that part.
        with contextlib.suppress(Exception):
            pipe.delete_adapters(name)
        raise ValueError(f"lora {label!r} cannot be loaded: {type(error).__name__}: {error}") from error


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
        # Names in the pipeline by path and version, the least recently used first.
        self._loaded: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._active: Lora | None = None
        # Whether the pipeline has the LoRAs of the last call. After a failed call, any may be active.
        self._is_current = True
        self._numbers = itertools.count()
        self.loads = 0

    def use(self, lora: Lora | None) -> None:
        """Activate ``lora``, loaded if necessary, in addition to the recipe's LoRAs; with None only the
        recipe's.

        Raises:
            ValueError: ``lora`` cannot be loaded. No other LoRA is unloaded then. The pipeline must not run
                before a next call, which activates its own LoRAs in any case.
        """
        if self._is_current and lora == self._active:
            return
        self._is_current = False
        scales = dict(self._scales_of_recipe)
        if lora is not None:
            scales[self._load(lora)] = lora.scale
        if scales:
            self._pipe.enable_lora()
            self._pipe.set_adapters(list(scales), list(scales.values()))
        else:
            self._pipe.disable_lora()
        self._active, self._is_current = lora, True
        encoders = text_encoders_of(self._pipe).values()
        if self._encoded_prompts is not None and any(
            getattr(module, "peft_config", None) for module in encoders
        ):
            self._encoded_prompts.clear()
        # Unload only now, when a LoRA that fails can no longer cost another its place, and when the outputs of
        # text encoders with the LoRA to unload are cleared.
        while len(self._loaded) > self._keep:
            _, oldest = self._loaded.popitem(last=False)
            self._pipe.delete_adapters(oldest)

    def _load(self, lora: Lora) -> str:
        """Return the name under which the pipeline has the LoRA, after loading it if necessary."""
        key = lora.path, lora.version
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        # No name is used twice: a LoRA that failed half-way may leave its name behind.
        name = f"request_{next(self._numbers)}"
        with warnings.catch_warnings():
            # peft warns that the model has several LoRAs, which is intended here.
            warnings.simplefilter("ignore")
            load_lora(self._pipe, lora.path, name, Path(lora.path).name)
        self.loads += 1
        self._loaded[key] = name
        return name
