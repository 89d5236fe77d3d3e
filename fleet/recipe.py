"""Recipes: options for loading and parallelizing a pipeline, which fleet/loading.py applies."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from para_core.adapters.components import TEXT_ENCODERS, VAE_PLACEMENTS, Quantize, TextEncoders, VaePlacement
from para_core.adapters.weights.quantize import QUANTIZE, require_quantize_fits
from para_core.attention.attention_options import ROTATE_METHODS, AttentionSchedule, RotateMethod
from para_core.attention.backend_selection import EXACT_FORM, Backend
from para_core.fleet.models import Model

Weights = Literal["replicate", "fsdp", "tensor"]
Compile = Literal["no", "blocks", "whole"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Offload = Literal["blocks", "model"]
CommDtype = Literal["int8", "float8_e4m3fn"]
_LONGEST_TIMEOUT = 365 * 24 * 3600
MESH_NAMES = ("pipe", "batch", "ring", "ulysses", "tensor")


@dataclass(frozen=True)
class Recipe:
    """Options for loading a pipeline on a group of ranks.

    Fields that are not listed here are arguments of :func:`parallelize_pipe`.

    Args:
        model (`str`): Folder, or repository on the Hub.
        dtype (`str`): ``"auto"`` is bfloat16 on a GPU and float32 elsewhere.
        mesh (`tuple[tuple[str, int], ...]`): Largest sizes of mesh dims, as pairs with a name of :data:`MESH_NAMES`.
            Empty leaves the choice to :func:`parallelize_pipe`.
        cache (`float` or `"default"`, *optional*): Threshold of First Block Cache; ``"default"`` is that of the model
            family. None disables it.
        compile (`"no"`, `"blocks"` or `"whole"`): Compile the transformer's blocks, with one graph for equal ones, or
            the whole transformer.
        weights (`"replicate"`, `"fsdp"` or `"tensor"`): How weights are distributed over ranks.
        text_encoders (`str`, *optional*): As in :func:`parallelize_pipe`, but with ``offload="blocks"`` the default is
            ``"offload"``.
        offload (`"blocks"` or `"model"`, *optional*): Modules that stay in host memory until they run: the
            transformer's blocks, as in :func:`parallelize_pipe`; or whole components (``enable_model_cpu_offload``,
            CUDA only).
        pipefusion (`int`, *optional*): Number of patches of PipeFusion, with pipeline stages (a ``pipe`` mesh dim) or
            on one rank. Not exact. None disables it.
        quantize (`str`, *optional*): How the transformers are quantized by torchao: ``"int8"``, ``"fp8"``,
            ``"int8-dynamic"`` or ``"fp8-dynamic"``. Not exact.
        comm_dtype (`"int8"` or `"float8_e4m3fn"`, *optional*): 8-bit dtype to which attention rounds the tensors that
            ranks exchange. Not exact.
        lora (`tuple[str, ...]`): Files or repositories, each with ``:scale`` if the scale is not 1.
        trust_remote_code (`bool`): Whether code of a modular pipeline's repository may run.
    """

    model: str
    dtype: Dtype = "auto"
    mesh: tuple[tuple[str, int], ...] = ()
    rotate_method: RotateMethod | None = None
    cache: float | Literal["default"] | None = None
    compile: Compile = "no"
    weights: Weights = "replicate"
    text_encoders: TextEncoders | None = None
    offload: Offload | None = None
    resident_blocks: int = 1
    pipefusion: int | None = None
    quantize: Quantize | None = None
    backend: Backend | AttentionSchedule | None = None
    cross_backend: Backend | None = None
    comm_dtype: CommDtype | None = None
    vae: bool = False
    vae_placement: VaePlacement | None = None
    lora: tuple[str, ...] = ()
    timeout: float = 600.0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, get_args(Dtype)),
            ("weights", self.weights, get_args(Weights)),
            ("compile", self.compile, get_args(Compile)),
            ("rotate_method", self.rotate_method, (None, *ROTATE_METHODS)),
            ("text_encoders", self.text_encoders, (None, *TEXT_ENCODERS)),
            ("vae_placement", self.vae_placement, (None, *VAE_PLACEMENTS)),
            ("offload", self.offload, (None, *get_args(Offload))),
            ("quantize", self.quantize, (None, *QUANTIZE)),
            ("backend", None if self.schedule else self.backend, (None, *get_args(Backend))),
            ("cross_backend", self.cross_backend, (None, *get_args(Backend))),
            ("comm_dtype", self.comm_dtype, (None, *get_args(CommDtype))),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(filter(None, allowed))}.")
        if isinstance(self.cache, float) and not self.cache >= 0:
            raise ValueError(f"cache is {self.cache:g}; expected a threshold of at least 0, or 'default'.")
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
        if self.offload is not None and self.weights != "replicate":
            raise ValueError(f"weights are {self.weights!r} with offload {self.offload!r}; expected 'replicate'.")

    @property
    def schedule(self) -> AttentionSchedule | None:
        """The attention schedule, if ``backend`` is one; otherwise None."""
        return self.backend if isinstance(self.backend, AttentionSchedule) else None

    @property
    def digest(self) -> str:
        """16 hex digits, equal for recipes whose results are equal up to rounding, even on different meshes."""
        backend = asdict(self.schedule) if self.schedule else self.backend
        decisive: tuple[Any, ...] = (self.model, self.dtype, self.cache, self.lora, backend, self.comm_dtype)
        if self.cross_backend is not None:
            decisive = (*decisive, "cross_backend", self.cross_backend)
        if self.pipefusion is not None:
            decisive = (*decisive, "PipeFusion", self.pipefusion, dict(self.mesh).get("pipe"))
        if self.quantize is not None:
            # With fsdp, torchao quantizes weights differently, so results differ by more than rounding.
            decisive = (*decisive, self.quantize, self.weights == "fsdp")
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def read_mesh_sizes(text: str) -> tuple[tuple[str, int], ...]:
    """Parse the option ``--mesh``: largest sizes of mesh dims. Raise ValueError if a name or size is invalid.

    >>> read_mesh_sizes("batch=2,ring=4")
    (('batch', 2), ('ring', 4))
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.strip().partition("=")
        if name not in MESH_NAMES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh has {part.strip()!r}; expected {', '.join(MESH_NAMES)} and their largest sizes: "
                "'batch=2,ring=2'."
            )
        if name in sizes:
            raise ValueError(f"mesh has two sizes for {name}; expected one.")
        sizes[name] = int(size)
    return tuple(sizes.items())


def read_lora(text: str) -> tuple[str, float]:
    """Split a LoRA option into ``(file or repository, scale)``. The scale is 1 if it is omitted.

    >>> read_lora("style.safetensors:0.8")
    ('style.safetensors', 0.8)
    """
    name, colon, scale = text.rpartition(":")
    if colon:
        try:
            return name, float(scale)
        except ValueError:
            # The text after the colon is not a number, so the colon belongs to the name.
            pass
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


def require_loras(recipe: Recipe) -> None:
    """Raise FileNotFoundError if a LoRA of the recipe is a path that does not exist.

    A LoRA that may be a Hub repository, ``owner/name``, is not checked.
    """
    for text in recipe.lora:
        name, _ = read_lora(text)
        path = Path(name)
        is_file = path.suffix in (".safetensors", ".bin", ".pt") or path.is_absolute() or len(path.parts) != 2
        if is_file and not path.exists():
            raise FileNotFoundError(
                f"lora {name!r} does not exist here; expected a file, a folder, or owner/name of the Hub."
            )


def refuse_options(model: Model, recipe: Recipe) -> None:
    """Raise ValueError if the pipeline of ``model`` lacks a method that a LoRA or ``offload="model"`` needs."""
    if recipe.lora and not model.takes_loras:
        raise ValueError(f"lora is {recipe.lora[0]!r}, but {model.pipeline} loads no LoRAs. Leave --lora out.")
    if recipe.offload == "model" and model.modular:
        raise ValueError(
            f"offload is 'model', but {model.pipeline} is a modular pipeline, and diffusers moves components as a "
            "whole for classical ones only. Use --offload blocks, or --text-encoders offload."
        )
