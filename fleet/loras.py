"""LoRAs of a pipeline: those of its recipe, and those of requests. The LoRAs that requests used last stay loaded.

`build.py` loads those of the recipe (:func:`load_loras_of_recipe`). :class:`~para_core.fleet.rank.Rank` makes
:class:`LoadedLoras` for the ranks of a server, and calls it before each batch; `http/lora_folder.py` finds
the file of a name. Tests: tests/fleet/test_rank.py, and tests/fleet/test_modular.py for those of the recipe.
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
from para_core.progress import report


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


def load_loras_of_recipe(pipe: Any, recipe: Recipe) -> None:
    """Load the LoRAs of ``recipe`` into ``pipe``, and activate them with their scales.

    Raises what :func:`load_lora` raises.
    """
    scales = _scales_of_recipe(recipe)
    for name, text in zip(scales, recipe.lora, strict=True):
        file, _ = read_lora(text)
        report(f"loading LoRA {file}")
        load_lora(pipe, file, name, file)
    if scales:
        pipe.set_adapters(list(scales), list(scales.values()))


def _scales_of_recipe(recipe: Recipe) -> dict[str, float]:
    """Return the scales of the recipe's LoRAs by their names in the pipeline, ``lora_0`` and so on."""
    return {f"lora_{index}": read_lora(text)[1] for index, text in enumerate(recipe.lora)}


class LoadedLoras:
    """The LoRAs of requests that are loaded into a pipeline, in addition to those of the recipe.

    :func:`load_loras_of_recipe` has loaded and activated the latter before. At most ``keep`` of requests,
    which is 1 or more, stay loaded: beyond it, the least recently used one is unloaded. ``encoded_prompts``
    is cleared when the LoRA changes, if LoRAs are loaded into text encoders. All ranks must make the same
    calls of :meth:`use`.

    Attributes:
        loads: How often a LoRA was loaded.
    """

    def __init__(
        self, pipe: Any, recipe: Recipe, keep: int, encoded_prompts: EncodedPrompts | None = None
    ) -> None:
        self._pipe, self._keep, self._encoded_prompts = pipe, keep, encoded_prompts
        self._scales_of_recipe = _scales_of_recipe(recipe)
        # Names in the pipeline by path and version, the least recently used first.
        self._loaded: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._active: Lora | None = None
        # Whether the last call has ended: the recipe's LoRAs and _active, and no others, are active then, and
        # at most _keep are loaded. After a failed call, any may be.
        self._is_current = True
        self._numbers = itertools.count()
        self.loads = 0

    def use(self, lora: Lora | None) -> None:
        """Activate ``lora``, loaded if necessary, in addition to the recipe's LoRAs; with None only the
        recipe's.

        Raises:
            ValueError: ``lora`` cannot be loaded. No other LoRA is unloaded then.

        After any exception the pipeline must not run before a next call, which activates its own LoRAs, and
        unloads what this one has not.
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
        encoders = text_encoders_of(self._pipe).values()
        if self._encoded_prompts is not None and any(
            getattr(module, "peft_config", None) for module in encoders
        ):
            self._encoded_prompts.clear()
        # Unload last: a LoRA that cannot be loaded must not cost another one its place, and outputs of text
        # encoders with the LoRA to unload are cleared before.
        while len(self._loaded) > self._keep:
            oldest = next(iter(self._loaded))
            self._pipe.delete_adapters(self._loaded[oldest])
            del self._loaded[oldest]  # Only now: if it cannot be deleted, the next call tries again.
        self._active, self._is_current = lora, True

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
