"""Recipes: options for loading and parallelizing a pipeline, which fleet/build.py applies."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from para_core.attention.schedule import AttentionSchedule
from para_core.fleet.model_files import GGUF
from para_core.fleet.pipeline_info import Model
from para_core.option_values import (
    EXACT_FORM,
    Backend,
    Quantize,
    RotateMethod,
    TextEncoders,
    VaePlacement,
    require_quantize_fits,
)

Compile = Literal["no", "blocks", "whole"]
Offload = Literal["blocks", "model"]
_LONGEST_TIMEOUT = 365 * 24 * 3600


@dataclass(frozen=True)
class Recipe:
    """Options for loading a pipeline on a group of ranks.

    Fields without a comment are arguments of :func:`parallelize_pipe`.
    """

    model: str  # folder, repository on the Hub, or single file
    pipeline: str | None = None  # class of diffusers that loads the model; None for that of its index
    config: str | None = None  # folder or repository with the configs of a single file
    controlnet: tuple[str, ...] = ()  # folders or repositories of ControlNets for the class
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # "auto": bfloat16 on a GPU, float32 elsewhere
    # Largest sizes of mesh dims, with names of mesh_shape.MESH_NAMES. Empty leaves the choice to parallelize_pipe.
    mesh: tuple[tuple[str, int], ...] = ()
    rotate_method: RotateMethod | None = None
    cache: float | Literal["default"] | None = None  # threshold of First Block Cache, or that of the model family
    compile: Compile = "no"  # the transformer's blocks, with one graph for equal ones, or the whole transformer
    weights: Literal["replicate", "fsdp", "tensor"] = "replicate"
    text_encoders: TextEncoders | None = None  # with offload="blocks" the default is "offload"
    # Modules that stay in host memory until they run: the transformer's blocks, as in parallelize_pipe, or whole
    # components (enable_model_cpu_offload, CUDA only).
    offload: Offload | None = None
    resident_blocks: int | None = None
    pipefusion: int | None = None  # number of patches, with pipeline stages (a pipe mesh dim) or on one rank; not exact
    quantize: Quantize | None = None  # of the transformers, by torchao; not exact
    backend: Backend | AttentionSchedule | None = None
    cross_backend: Backend | None = None
    comm_dtype: Literal["int8", "float8_e4m3fn"] | None = None  # of what ranks exchange in attention; not exact
    vae: bool = False
    vae_placement: VaePlacement | None = None
    lora: tuple[str, ...] = ()  # files or repositories, each with ":scale" if the scale is not 1
    timeout: float = 600.0
    verify: bool = False
    trust_remote_code: bool = False  # whether code of a modular pipeline's repository may run

    def __post_init__(self) -> None:
        if self.cache not in (None, "default") and not (isinstance(self.cache, (int, float)) and 0 <= self.cache < inf):
            raise ValueError(f"cache is {self.cache!r}; expected a threshold of at least 0, or 'default'.")
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
            allowed = [choice for literal in literals for choice in get_args(literal)]
            if allowed and isinstance(value, str) and value not in allowed:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}.")
        if not 0 < self.timeout < _LONGEST_TIMEOUT:
            raise ValueError(f"timeout is {self.timeout:g} s; expected a positive number of seconds, at most a year.")
        if self.weights == "tensor" and "tensor" not in dict(self.mesh):
            raise ValueError(
                "weights are 'tensor', but the mesh has no tensor dim; expected a size, such as --mesh tensor=2."
            )
        if self.pipefusion is not None and self.pipefusion < 1:
            raise ValueError(f"pipefusion is {self.pipefusion}; expected a number of patches.")
        if self.pipefusion is not None and self.schedule is not None:
            raise ValueError(
                f"pipefusion is {self.pipefusion}, which computes several steps at the same time; attention by step "
                "needs one after the other. Leave one out."
            )
        if self.model.endswith(GGUF):
            _require_gguf_fits(self)
        if self.quantize is not None:
            require_quantize_fits(self.quantize, None if self.weights == "replicate" else self.weights)
        if self.offload == "model" and self.text_encoders not in (None, "replicate"):
            raise ValueError(
                f"text encoders are {self.text_encoders!r} with offload 'model', which moves them; leave one out."
            )
        if self.vae and self.vae_placement == "first":
            raise ValueError("vae_placement is 'first', and vae runs the VAE on all ranks; leave one out.")
        if self.offload == "model" and self.vae_placement not in (None, "replicate"):
            raise ValueError(
                f"vae_placement is {self.vae_placement!r} with offload 'model', which moves it; leave one out."
            )
        if self.resident_blocks is not None and self.offload != "blocks":
            raise ValueError(
                f"resident_blocks is {self.resident_blocks} with offload {self.offload!r}, where no block waits in "
                "host memory; expected offload 'blocks', or leave one out."
            )
        if self.offload is not None and self.weights != "replicate":
            raise ValueError(f"weights are {self.weights!r} with offload {self.offload!r}; expected 'replicate'.")
        if self.verify:
            obstacles = _obstacles_to_verify(self)
            if obstacles:
                raise ValueError(
                    f"verify compares transformer calls with those of one rank, and {', '.join(obstacles)} leaves "
                    "nothing equal to compare with. Verify without it."
                )

    @property
    def schedule(self) -> AttentionSchedule | None:
        """The attention schedule, if ``backend`` is one; otherwise None."""
        return self.backend if isinstance(self.backend, AttentionSchedule) else None

    @property
    def digest(self) -> str:
        """16 hex digits, equal for recipes whose results are equal up to rounding, even on different meshes."""
        backend = asdict(self.schedule) if self.schedule else self.backend
        decisive: tuple[Any, ...] = (self.model, self.dtype, self.cache, self.lora, backend, self.comm_dtype)
        other_classes = {"pipeline": self.pipeline, "config": self.config, "controlnet": self.controlnet}
        if any(other_classes.values()):
            decisive = (*decisive, other_classes)
        if self.cross_backend is not None:
            decisive = (*decisive, "cross_backend", self.cross_backend)
        if self.pipefusion is not None:
            decisive = (*decisive, "PipeFusion", self.pipefusion, dict(self.mesh).get("pipe"))
        if self.quantize is not None:
            # With fsdp, torchao quantizes weights differently, so results differ by more than rounding.
            decisive = (*decisive, self.quantize, self.weights == "fsdp")
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def _require_gguf_fits(recipe: Recipe) -> None:
    """Raise ValueError if an option needs plain weights, while the model is a GGUF file, whose weights stay packed."""
    pipe = dict(recipe.mesh).get("pipe", 1)
    values = {
        "weights": None if recipe.weights == "replicate" else recipe.weights,
        "quantize": recipe.quantize,
        "compile": None if recipe.compile == "no" else recipe.compile,
        "mesh": f"pipe={pipe}" if pipe > 1 else None,
    }
    for name, value in values.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, and model is {recipe.model!r}, whose packed weights can be neither sharded nor "
                f"compiled nor quantized again. Leave --{name} out, or use weights in 16 bits."
            )


def read_lora(text: str) -> tuple[str, float]:
    """Split a LoRA option into ``(file or repository, scale)``. The scale is 1 if it is omitted.

    >>> read_lora("style.safetensors:0.8")
    ('style.safetensors', 0.8)
    """
    name, colon, scale = text.rpartition(":")
    if colon:
        # If the text after the colon is not a number, the colon belongs to the name.
        with suppress(ValueError):
            return name, float(scale)
    return text, 1.0


def approximations(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the recipe's options that change results by more than rounding.

    >>> approximations(Recipe("model", cache=0.1, comm_dtype="int8"))
    ('cache', 'comm_dtype')
    """
    values = {
        "cache": recipe.cache or None,
        "pipefusion": recipe.pipefusion,
        "quantize": recipe.quantize,
        "backend": recipe.backend if recipe.backend in EXACT_FORM else None,
        "attention_schedule": recipe.schedule if recipe.schedule and recipe.schedule.approximates else None,
        "cross_backend": recipe.cross_backend if recipe.cross_backend in EXACT_FORM else None,
        "comm_dtype": recipe.comm_dtype,
    }
    return tuple(name for name, value in values.items() if value is not None)


def can_verify(recipe: Recipe) -> bool:
    """Whether ``verify`` can be set in ``recipe``: nothing in it changes transformer calls by more than rounding."""
    return not _obstacles_to_verify(recipe)


def _obstacles_to_verify(recipe: Recipe) -> list[str]:
    # A step that a cache skips is left out, and the unmodified model has the same quantized weights.
    names = [name for name in approximations(recipe) if name not in ("cache", "quantize")]
    return names + (["a mesh with pipe"] if dict(recipe.mesh).get("pipe", 1) > 1 else [])


def require_loras(recipe: Recipe) -> None:
    """Raise FileNotFoundError if a LoRA of the recipe is a path that does not exist, and ValueError if it is no name.

    One that may be a Hub repository, ``owner/name``, is not checked.
    """
    for text in recipe.lora:
        name, scale = read_lora(text)
        if not name or not isfinite(scale):
            raise ValueError(f"lora is {text!r}; expected a file or Hub name, and a finite scale if any.")
        path = Path(name)
        is_file = path.suffix in (".safetensors", ".bin", ".pt") or path.is_absolute() or len(path.parts) != 2
        if is_file and not path.exists():
            raise FileNotFoundError(
                f"lora {name!r} does not exist here; expected a file, a folder, or owner/name of the Hub."
            )


def refuse_options(model: Model, recipe: Recipe) -> None:
    """Raise ValueError if the pipeline of ``model`` lacks a method that a LoRA or ``offload="model"`` needs.

    Raise what :func:`require_loras` raises.
    """
    if recipe.lora and not model.takes_loras:
        raise ValueError(f"lora is {recipe.lora[0]!r}, but {model.pipeline} loads no LoRAs. Leave --lora out.")
    require_loras(recipe)
    if recipe.offload == "model" and model.modular:
        raise ValueError(
            f"offload is 'model', but {model.pipeline} is a modular pipeline, and diffusers moves components as a "
            "whole for classical ones only. Use --offload blocks, or --text-encoders offload."
        )
