"""The served model as ``GET /v1/models`` shows it: OpenAI's fields, and what a page needs to fill its form.

`server.py` makes the card once, at its start. `videos.py` takes ``id`` and ``defaults`` from it for its
records. Tests: tests/fleet/test_openai.py.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from para_core.fleet.pipeline_info import FRAME_PARAMETERS, TINY_FLUX_FIELDS, PipelineInfo, find_tiny_flux

# Parameters of pipelines' calls whose defaults are shown.
_SHOWN_DEFAULTS = ("num_inference_steps", "guidance_scale", "true_cfg_scale", *FRAME_PARAMETERS)
_EXAMPLE_PROMPTS = {
    "image": "a lighthouse on a cliff at dusk, oil painting",
    "video": "waves break on a beach, seen from above, slow camera",
}
# A caption of the small model that leaves nothing to what is usual.
_TINY_PROMPT = "a large red circle in the centre on a white background"


def make_model_card(model: PipelineInfo) -> dict[str, Any]:
    """Return the JSON object that describes ``model``.

    Besides OpenAI's fields it has ``pipeline``; ``kind``; ``defaults`` of fields that a request leaves out,
    in which ``size`` is None if only the loaded pipeline knows it; and ``example``, fields of a request that
    fits the model. ``page.html`` fills its form with these.
    """
    values = {**model.fields, **model.defaults}
    defaults = {key: values[key] for key in _SHOWN_DEFAULTS if _is_number(values.get(key))}
    width, height = values.get("width"), values.get("height")
    size: str | None = None
    if _is_number(width) and _is_number(height):
        size = f"{width}x{height}"
    example = {"prompt": _EXAMPLE_PROMPTS[model.kind]}
    if _is_tiny(model):
        # The page needs this size if the model was named by its path: only without a name it has defaults.
        tiny_size = f"{TINY_FLUX_FIELDS['width']}x{TINY_FLUX_FIELDS['height']}"
        example = {"prompt": _TINY_PROMPT, "size": tiny_size}
    return {
        "id": _public_name(model),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "para_core",
        "pipeline": model.pipeline,
        "kind": model.kind,
        "defaults": {"size": size, **defaults},
        "example": example,
    }


def _public_name(model: PipelineInfo) -> str:
    """Return the name by which clients know ``model``: that of its repository, or the last part of a local
    path, because clients must not learn paths of this machine.
    """
    if _is_tiny(model):
        return "tiny-flux"
    name, path = model.name, Path(model.name)
    if path.exists():  # The folder, or the single file of weights.
        name = path.name
        if name in ("", ".."):  # of the paths "." and ".."
            name = path.resolve().name
    return name or model.pipeline


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_tiny(model: PipelineInfo) -> bool:
    """Whether ``model`` is the tiny FLUX of this checkout. An installed package has none, and no other name for it."""
    with suppress(OSError):
        return Path(model.name).resolve() == find_tiny_flux().resolve()
    return False
