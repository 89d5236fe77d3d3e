"""Recipes: options for loading and parallelizing a pipeline, which fleet/build.py applies.

`cli/checks.py` makes one of the options of a command. The options that :func:`parallelize_pipe` has too stand
in `para_core/pipeline_options.py`, those of a replica in `rank.py`. Checks that need the model are at the end
of this file and in `selection.py`. Tests: tests/fleet/test_recipe.py, tests/cli/test_refusals.py.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from para_core.call_checks import can_check, check_comparable
from para_core.declared_options import Command, Option, check_values, declarations
from para_core.distributed.mesh_shape import parse_mesh_sizes
from para_core.fleet.model_files import GGUF
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.option_values import Offload, Quantize, TextEncoders, check_quantize_fits
from para_core.pipeline_options import PIPELINE, RANKS, PipelineChoices

Compile = Literal["no", "blocks", "whole"]
_LONGEST_TIMEOUT = 365 * 24 * 3600


@dataclass(frozen=True)
class Recipe(PipelineChoices):
    """Options for loading a pipeline on a group of ranks, and for parallelizing it: see
    :class:`PipelineChoices`.
    """

    model: str  # folder, repository on the Hub, or single file
    pipeline: Annotated[
        str | None,  # class of diffusers that loads the model; None for that of its index
        Option(50, command=Command("Another class: FluxImg2ImgPipeline.", "CLASS", PIPELINE)),
    ] = None
    config: str | None = None  # folder or repository with the configs of a single file
    controlnet: Annotated[
        tuple[str, ...],  # folders or repositories of ControlNets for the class
        Option(60, command=Command("Folder or Hub name of a ControlNet.", "NAME", PIPELINE)),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],  # "auto": bfloat16 on a GPU, float32 elsewhere
        Option(80, command=Command("auto, float32, bfloat16 or float16.", "TYPE", PIPELINE)),
    ] = "auto"
    # Largest sizes of mesh dims, with names of mesh_shape.MESH_NAMES. Empty leaves the choice to
    # parallelize_pipe.
    mesh: Annotated[
        tuple[tuple[str, int], ...],
        Option(10, command=Command("Largest sizes: batch=2,ring=2.", "DIMS", RANKS)),
    ] = ()
    cache: Annotated[
        float | Literal["default"] | None,  # threshold of First Block Cache, or that of the model family
        Option(100, command=Command("First Block Cache: threshold or default.", "X", PIPELINE)),
    ] = None
    compile: Annotated[
        Compile,  # the transformer's blocks, with one graph for equal ones, or the whole transformer
        Option(110, command=Command("no, blocks or whole.", "HOW", PIPELINE)),
    ] = "no"
    weights: Annotated[
        Literal["replicate", "fsdp", "tensor"],
        Option(120, needs_ranks=True, command=Command("replicate, fsdp or tensor.", "HOW", PIPELINE)),
    ] = "replicate"
    # Modules that stay in host memory until they run: the transformer's blocks, as in parallelize_pipe, or
    # whole components (enable_model_cpu_offload, CUDA only).
    offload: Annotated[
        Offload | None,
        Option(140, command=Command("Wait in host memory: blocks or model.", "WHAT", PIPELINE)),
    ] = None
    pipefusion: Annotated[
        int | None,  # number of patches, with pipeline stages (a pipe mesh dim) or on one rank; not exact
        Option(250, at_least=1, command=Command("Patches of stages; not exact.", "N", RANKS)),
    ] = None
    quantize: Annotated[
        Quantize | None,  # of the transformers, by torchao; not exact
        Option(160, command=Command("int8, fp8, int8-dynamic, fp8-dynamic.", "HOW", PIPELINE, plans=True)),
    ] = None
    comm_dtype: Annotated[
        Literal["int8", "float8_e4m3fn"] | None,  # of what ranks exchange in attention; not exact
        Option(230, needs_ranks=True, command=Command("int8 or float8_e4m3fn; not exact.", "TYPE", RANKS)),
    ] = None
    lora: Annotated[
        tuple[str, ...],  # files or repositories, each with ":scale" if the scale is not 1
        Option(190, command=Command("File or Hub name[:scale].", "NAME", PIPELINE)),
    ] = ()
    timeout: Annotated[float, Option(260, command=Command("Seconds that ranks wait.", "S", RANKS))] = 600
    trust_remote_code: Annotated[
        bool,  # whether code of a modular pipeline's repository may run
        Option(90, command=Command("Run a modular repository's code.", "", PIPELINE)),
    ] = False

    def __post_init__(self) -> None:
        # Each value is checked by itself first, because the checks of several options rely on valid values.
        # The cache comes before check_values, which knows only the name "default" and no thresholds.
        is_threshold = isinstance(self.cache, (int, float)) and 0 <= self.cache < inf
        if self.cache not in (None, "default") and not is_threshold:
            raise ValueError(f"cache is {self.cache!r}; expected a threshold of at least 0, or 'default'.")
        check_values(self)
        if not 0 < self.timeout <= _LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout is {self.timeout:g} s; expected a positive number of seconds, at most a year."
            )
        # Called for its errors.
        parse_mesh_sizes(",".join(f"{name}={size}" for name, size in self.mesh))
        if self.weights == "tensor" and "tensor" not in dict(self.mesh):
            raise ValueError(
                "weights are 'tensor', but the mesh has no tensor dim; expected a size, such as --mesh tensor=2."
            )
        if self.pipefusion is not None and self.schedule is not None:
            raise ValueError(
                f"pipefusion is {self.pipefusion}, which computes several steps at the same time; attention by step "
                "needs one after the other. Leave one out."
            )
        if self.model.endswith(GGUF):
            _check_gguf(self)
        if self.quantize is not None:
            check_quantize_fits(self.quantize, self.sharding)
            if self.products is not None:
                raise ValueError(
                    f"products is {self.products!r} with quantize {self.quantize!r}, whose weights have products of "
                    "their own. Leave one out."
                )
        self.check_vae()
        _check_host_memory(self)
        check_comparable(vars(self), approximations(self), self.stages)

    @property
    def stages(self) -> int:
        """The largest number of pipeline stages."""
        return dict(self.mesh).get("pipe", 1)

    @property
    def sharding(self) -> Literal["fsdp", "tensor"] | None:
        """The way to shard the weights. None if each rank holds all of them."""
        if self.weights == "replicate":
            return None
        return self.weights

    @property
    def moves_weights(self) -> bool:
        """Whether weights are sharded over ranks, or wait in host memory until their component runs."""
        return self.sharding is not None or self.offload is not None or bool(self.placements)

    @property
    def encoders_placement(self) -> TextEncoders:
        """The placement of the text encoders, with the default that follows from the other options."""
        if self.offload is not None:
            return self.encoders_or("offload")
        if self.sharding is not None:
            return self.encoders_or("fsdp")
        return self.encoders_or("replicate")

    @property
    def encoders_wait_on_host(self) -> bool:
        """Whether the text encoders wait in host memory: by their placement, or with the blocks if they have
        none.
        """
        if self.places_encoders:
            return self.encoders_in_host_memory
        return self.offload == "blocks"

    @property
    def digest(self) -> str:
        """16 hex digits. Recipes with the same have results that are equal up to rounding; some others have,
        too.

        :func:`~para_core.fleet.result_files.choose_names` finds finished files by it. So a new option that
        changes results must be added, and only if it is set, or files of earlier versions would be generated
        again. tests/fleet/test_recipe.py lists the options that change results, and those that do not.
        """
        # A threshold of 0 skips no step, as no cache does.
        cache = self.cache or None
        backend: Any = self.backend
        if self.schedule:
            backend = asdict(self.schedule)
        decisive: tuple[Any, ...] = (self.model, self.dtype, cache, self.lora, backend, self.comm_dtype)
        other_classes = {"pipeline": self.pipeline, "config": self.config, "controlnet": self.controlnet}
        if any(other_classes.values()):
            decisive = (*decisive, other_classes)
        if self.cross_backend is not None:
            decisive = (*decisive, "cross_backend", self.cross_backend)
        if self.pipefusion is not None:
            # The number of stages changes no bit. None stands where earlier versions had it, so that files of
            # one stage are found again.
            decisive = (*decisive, "PipeFusion", self.pipefusion, None)
        if self.quantize is not None:
            # With fsdp, torchao quantizes weights differently, so results differ by more than rounding.
            decisive = (*decisive, self.quantize, self.weights == "fsdp")
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def _check_host_memory(recipe: Recipe) -> None:
    """Raise ValueError if an option contradicts ``offload``, or needs it."""
    offload = recipe.offload
    if offload == "model":
        for name, placement in recipe.placements.items():
            raise ValueError(
                f"{name} is {placement!r} with offload 'model', which moves all weights; leave one out."
            )
    if recipe.resident_blocks is not None and offload != "blocks":
        raise ValueError(
            f"resident_blocks is {recipe.resident_blocks} with offload {offload!r}, where no block waits in host "
            "memory; expected offload 'blocks', or leave one out."
        )
    if offload is not None and recipe.sharding is not None:
        raise ValueError(f"weights are {recipe.weights!r} with offload {offload!r}; expected 'replicate'.")


def _check_gguf(recipe: Recipe) -> None:
    """Raise ValueError if an option needs plain weights, while the model is a GGUF file, whose weights stay
    packed.
    """
    stages = recipe.stages
    values: dict[str, str | None] = {
        "weights": recipe.sharding,
        "quantize": recipe.quantize,
        "products": recipe.products,
    }
    if recipe.compile != "no":
        values["compile"] = recipe.compile
    if stages > 1:
        values["mesh"] = f"pipe={stages}"
    for name, value in values.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, and model is {recipe.model!r}, whose packed weights can be neither sharded nor "
                f"compiled nor quantized again, and have products of their own. Leave --{name} out, or use weights in "
                "16 bits."
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
    # A cache with the threshold 0 skips no step.
    names = [name for name in ("cache", "pipefusion", "quantize") if getattr(recipe, name)]
    for name in recipe.approximate_backends:
        # In a command, a schedule is an option of its own.
        if name == "backend" and recipe.schedule is not None:
            names.append("attention_schedule")
        else:
            names.append(name)
    if recipe.comm_dtype is not None:
        names.append("comm_dtype")
    return tuple(names)


def on_one_rank(recipe: Recipe) -> Recipe:
    """Return ``recipe`` without the options that do something on several ranks only.

    ``pipefusion`` stays, because one rank computes the same approximation (docs/stages.md).
    """
    # FSDP2 shards weights over several ranks only, also where other values of an option do something on one.
    options = [
        each
        for each in declarations(Recipe)
        if each.option.needs_ranks or getattr(recipe, each.name) == "fsdp"
    ]
    defaults = {each.name: each.default for each in options}
    return replace(recipe, mesh=(), **defaults)


def can_verify(recipe: Recipe) -> bool:
    """Whether ``verify`` can be set in ``recipe``: nothing in it changes transformer calls by more than
    rounding.
    """
    return can_check("verify", approximations(recipe), recipe.stages)


def require_loras(recipe: Recipe) -> None:
    """Check the LoRAs of the recipe. One that may be a Hub repository, ``owner/name``, is not looked for.

    Raises:
        FileNotFoundError: A LoRA is a path that does not exist.
        ValueError: A LoRA has no name, or its scale is not finite.
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


def check_options_of_model(model: PipelineInfo, recipe: Recipe) -> None:
    """Check that the pipeline of ``model`` has the methods that a LoRA and ``offload="model"`` need.

    Raises what :func:`require_loras` raises, too.

    Raises:
        ValueError: The pipeline loads no LoRAs, or is modular and cannot move its components as a whole.
    """
    if recipe.lora and not model.takes_loras:
        raise ValueError(
            f"lora is {recipe.lora[0]!r}, but {model.pipeline} loads no LoRAs. Leave --lora out."
        )
    require_loras(recipe)
    if recipe.offload == "model" and model.modular:
        raise ValueError(
            f"offload is 'model', but {model.pipeline} is a modular pipeline, and diffusers moves components as a "
            "whole for classical ones only. Use --offload blocks, or --text-encoders offload."
        )
