"""Recipes: options for loading and parallelizing a pipeline, and the functions that do it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters import apply_cache_on_pipe, from_pretrained_sharded, parallelize_pipe
from para_core.adapters.components import Quantize, TextEncoders, VaePlacement
from para_core.adapters.registry import mesh_of, transformers_of
from para_core.adapters.weights.quantize import (
    QUANTIZE,
    loading_config,
    quantize_transformers,
    require_quantize_fits,
)
from para_core.adapters.weights.text_encoders import (
    TEXT_ENCODERS,
    encoders_with_blocks,
    text_encoders_of,
)
from para_core.adapters.weights.vaes import VAE_PLACEMENTS, vaes_of
from para_core.attention.attention_options import ROTATE_METHODS, RotateMethod
from para_core.attention.backend_selection import EXACT_FORM, Backend
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.fleet.modular import has_modular_index, is_modular, load_modular
from para_core.instance_patching import original_class
from para_core.weights.pipefusion import PipeFusion

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

    Args:
        model (`str`): Folder, or repository on the Hub.
        dtype (`str`): ``"auto"`` is bfloat16 on a GPU and float32 elsewhere.
        mesh (`tuple[tuple[str, int], ...]`): Largest sizes of mesh dims, as pairs with a name of :data:`MESH_NAMES`.
            Empty leaves the choice to :func:`parallelize_pipe`.
        rotate_method (`str`, *optional*): How keys and values are exchanged along the ring, as in
            :func:`parallelize_pipe`. Defaults to the choice made with the mesh.
        cache (`float` or `"default"`, *optional*): Threshold of First Block Cache; ``"default"`` is that of the model
            family. None disables it.
        compile (`"no"`, `"blocks"` or `"whole"`): Compile the transformer's blocks, with one graph for equal ones, or
            the whole transformer.
        weights (`"replicate"`, `"fsdp"` or `"tensor"`): How weights are distributed over ranks.
        text_encoders (`str`, *optional*): Placement of the text encoders, as in :func:`parallelize_pipe`. Defaults to
            ``"fsdp"`` if the weights are sharded, else to every rank's device.
        offload (`"blocks"` or `"model"`, *optional*): What stays in host memory until it runs: the transformer's
            blocks, as in :func:`parallelize_pipe`; or whole components (``enable_model_cpu_offload``, CUDA only).
        resident_blocks (`int`): With offload ``"blocks"``, the number of first blocks that stay on the device.
        pipefusion (`int`, *optional*): Number of patches of PipeFusion, with pipeline stages (a ``pipe`` mesh dim) or
            on one rank. Not exact. None disables it.
        quantize (`str`, *optional*): How the transformers are quantized by torchao: ``"int8"``, ``"fp8"``,
            ``"int8-dynamic"`` or ``"fp8-dynamic"``. Not exact.
        backend (`str`, *optional*): Backend of local attention, as in :func:`parallelize_pipe`.
        comm_dtype (`"int8"` or `"float8_e4m3fn"`, *optional*): Rounds what attention sends to 8 bits. Not exact.
        vae (`bool`): Whether the VAE also runs on all ranks.
        vae_placement (`str`, *optional*): Placement of the VAE, as in :func:`parallelize_pipe`.
        lora (`tuple[str, ...]`): Files or repositories, each with ``:scale`` if the scale is not 1.
        timeout (`float`): Seconds that ranks wait for each other.
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
    backend: Backend | None = None
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
            ("backend", self.backend, (None, *get_args(Backend))),
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
    def digest(self) -> str:
        """16 hex digits, equal if results are equal up to rounding. So mesh and compilation do not count."""
        decisive: tuple[Any, ...] = (self.model, self.dtype, self.cache, self.lora, self.backend, self.comm_dtype)
        if self.pipefusion is not None:
            decisive = (*decisive, "PipeFusion", self.pipefusion, dict(self.mesh).get("pipe"))
        if self.quantize is not None:
            # With fsdp, torchao quantizes weights in another way, so results differ.
            decisive = (*decisive, self.quantize, self.weights == "fsdp")
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON-compatible values."""
        return {**asdict(self), "mesh": dict(self.mesh)}


def read_mesh_sizes(text: str) -> tuple[tuple[str, int], ...]:
    """Parse the option ``--mesh``: largest sizes of mesh dims.

    >>> read_mesh_sizes("batch=2,ring=4")
    (('batch', 2), ('ring', 4))

    Raises:
        ValueError: If a name or size is invalid.
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
            pass  # What follows the colon is no number, so the colon belongs to the name.
    return text, 1.0


class LoadingOrder(Protocol):
    """Interface of :class:`~para_core.fleet.encode_first.EncodeFirst`, which imports this module."""

    def fits(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` keeps text encoders and transformers on the device: then :meth:`attach` saves memory."""

    def attach(self, pipe: Any, device: str, *, park: bool) -> None:
        """Prepare ``pipe``, whose weights are in host memory. For the arguments see ``EncodeFirst.attach``."""


def build(recipe: Recipe, encode_first: LoadingOrder | None = None) -> Any:
    """Load the pipeline of ``recipe``, and apply its options. A collective call on the default process group, if any.

    Args:
        encode_first (`LoadingOrder`, *optional*): Attached to the pipeline if it fits the recipe. It then decides when
            text encoders and transformers are on the device.

    Raises what ``from_pretrained``, :func:`parallelize_pipe` and :func:`apply_cache_on_pipe` raise.
    """
    from diffusers import DiffusionPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = _mesh(recipe, device) if ranks > 1 else None
    weights = None if recipe.weights == "replicate" or ranks == 1 else recipe.weights
    text_encoders = recipe.text_encoders or ("offload" if recipe.offload == "blocks" else None)
    if weights is not None and not recipe.lora and not has_modular_index(recipe.model):
        mesh = mesh or init_context_parallel_mesh(device)
        pipe = from_pretrained_sharded(
            DiffusionPipeline,
            recipe.model,
            mesh=mesh,
            weights=weights,
            quantize=recipe.quantize,
            dtype=dtype_of(recipe),
        )
        if weights == "tensor" and encoders_with_blocks(pipe):
            text_encoders = text_encoders or "fsdp"
        weights = None  # parallelize_pipe must not shard the weights again.
    else:
        pipe = _load_whole(recipe, weights, text_encoders, device, encode_first)
    if text_encoders is not None and not text_encoders_of(pipe):
        text_encoders = recipe.text_encoders
    parallelize_pipe(
        pipe,
        mesh=mesh,
        vae=recipe.vae and ranks > 1,
        weights=weights,
        text_encoders=text_encoders,
        vae_placement=recipe.vae_placement,
        offload="blocks" if recipe.offload == "blocks" else None,
        resident_blocks=recipe.resident_blocks,
        pipefusion=None if recipe.pipefusion is None else PipeFusion(recipe.pipefusion),
        backend=recipe.backend,
        comm_dtype=None if recipe.comm_dtype is None else getattr(torch, recipe.comm_dtype),
        rotate_method=recipe.rotate_method,
        timeout=recipe.timeout,
    )
    if weights == "tensor" and recipe.quantize is not None:
        quantize_transformers(pipe, recipe.quantize)
    if recipe.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    if recipe.cache is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=None if recipe.cache == "default" else recipe.cache)
    _compile(pipe, recipe.compile)
    if not is_modular(pipe):
        pipe.set_progress_bar_config(disable=True)
    return pipe


def build_unmodified(recipe: Recipe) -> Any:
    """Load the pipeline of ``recipe`` on this rank alone, as diffusers runs it: no mesh, cache or compilation.

    LoRAs and quantization are applied. If the recipe shards weights or keeps them in host memory, diffusers' model
    offload is enabled, because all weights may not fit on this rank's GPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spares_memory = recipe.weights != "replicate" or recipe.offload is not None or recipe.text_encoders is not None
    offload: Offload | None = "model" if spares_memory and device == "cuda" else None
    pipe = _load_whole(replace(recipe, weights="replicate", offload=offload), None, None, device, None)
    if offload is not None:
        pipe.enable_model_cpu_offload(device=device)
    if not is_modular(pipe):
        pipe.set_progress_bar_config(disable=True)
    return pipe


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
        "comm_dtype": recipe.comm_dtype,
    }
    return tuple(name for name, value in values.items() if value is not None)


def _load_whole(
    recipe: Recipe,
    weights: str | None,
    text_encoders: TextEncoders | None,
    device: str,
    encode_first: LoadingOrder | None,
) -> Any:
    """Load the pipeline with all weights and LoRAs on this rank. Move to ``device`` what does not stay in host memory.

    Args:
        weights: How the caller will shard the weights, None for not at all.
    """
    quantize = recipe.quantize
    pipe = _load_pipeline(recipe, quantize if weights is None else None)
    if quantize is not None and not transformers_of(pipe):
        raise ValueError(f"quantize is {quantize!r}, but {original_class(pipe).__name__} has no transformer.")
    _load_lora(pipe, recipe.lora)
    if quantize is not None and weights == "fsdp":
        quantize_transformers(pipe, quantize, before_fsdp=True)
    on_host = {*text_encoders_of(pipe)} if text_encoders in ("offload", "first") else set()
    if recipe.vae_placement in ("offload", "first"):
        on_host |= {*vaes_of(pipe)}
    if recipe.offload == "blocks":
        on_host |= {*transformers_of(pipe)}
    if encode_first is not None and encode_first.fits(recipe):
        # Only plain weights can be parked in host memory. Quantized denoisers stay on the device; they are small.
        encode_first.attach(pipe, device, park=quantize is None)
    if recipe.offload != "model":
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in on_host:
                part.to(device)
    return pipe


def _load_pipeline(recipe: Recipe, quantize: Quantize | None) -> Any:
    from diffusers import DiffusionPipeline

    quantization = None if quantize is None else loading_config(quantize)
    if has_modular_index(recipe.model):
        return load_modular(
            recipe.model,
            dtype=dtype_of(recipe),
            quantization=None if quantization is None else quantization.quant_mapping,
            trust_remote_code=recipe.trust_remote_code,
        )
    config = {} if quantization is None else {"quantization_config": quantization}
    return DiffusionPipeline.from_pretrained(recipe.model, dtype=dtype_of(recipe), **config)


def mesh_shape(pipe: Any) -> dict[str, int]:
    """Return the sizes of the mesh dims that ``pipe`` runs on, by name. ``pipe`` and ``tensor`` only if above 1."""
    mesh = mesh_of(pipe)
    if mesh is None:
        return {"batch": 1, "ring": 1, "ulysses": 1}
    sizes = {"batch": mesh.batch.size, "ring": mesh.sequence.ring.size, "ulysses": mesh.sequence.ulysses.size}
    others = {"pipe": mesh.pipe.size, "tensor": mesh.tensor.size}
    return {**sizes, **{name: size for name, size in others.items() if size > 1}}


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which this process loads the pipeline of ``recipe``."""
    if recipe.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    return dtype


def _mesh(recipe: Recipe, device: str) -> DeviceMesh | None:
    if not recipe.mesh:
        return None
    return init_context_parallel_mesh(device, **{f"max_{name}_dim_size": size for name, size in recipe.mesh})


def _load_lora(pipe: Any, loras: tuple[str, ...]) -> None:
    scales: dict[str, float] = {}
    for index, text in enumerate(loras):
        name, scale = read_lora(text)
        try:
            pipe.load_lora_weights(name, adapter_name=f"lora_{index}")
        except Exception as error:
            # A LoRA of another model, or an unreachable Hub, may raise anything. The message names the LoRA.
            raise ValueError(f"lora {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        scales[f"lora_{index}"] = scale
    if scales:
        pipe.set_adapters(list(scales), list(scales.values()))


def _compile(pipe: Any, how: Compile) -> None:
    if how == "no":
        return
    transformers = transformers_of(pipe)
    if not transformers:
        raise ValueError(f"compile is {how!r}, but {original_class(pipe).__name__} has no transformer; expected 'no'.")
    for name, transformer in transformers.items():
        module: Any = transformer
        if how == "blocks":
            module.compile_repeated_blocks(fullgraph=True)
        else:
            setattr(pipe, name, torch.compile(module, fullgraph=True))
