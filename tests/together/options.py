"""The options of a pipeline that users combine, as data: their values, and combinations that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The values of each axis. The first one is the default, which a case's id omits. Names are unique over all axes.
AXES: dict[str, tuple[str, ...]] = {
    "pipeline": (
        *("flux", "klein", "wan", "wan22", "ltx", "cogvideox"),
        *("sd3", "mochi", "qwen", "hunyuan", "pixart", "unet"),
    ),
    # Each value has sizes of mesh dims; "auto" omits mesh=.
    "mesh": (
        *("ulysses2", "auto1", "auto2", "ring2", "batch2", "pipe2", "tensor2"),
        *("ring3", "ulysses3", "pipe3", "ring4", "ulysses4"),
        *("ring2-ulysses2", "batch2-ring2", "batch2-pipe2", "pipe2-ring2", "ring2-tensor2"),
    ),
    "guidance": ("plain", "cfg"),
    "prompts": ("prompt", "prompts"),
    "cache": ("uncached", "zero", "hits", "threshold"),
    "cache order": ("cache-last", "cache-first"),
    "weights": ("whole-weights", "replicate", "fsdp", "tensor"),
    # Cases with a placed VAE must also decode, so that the VAE runs.
    "vae": ("latents", "vae"),
    "vae placement": ("auto-vae", "vae-replicate", "vae-offload", "vae-first"),
    "pipefusion": ("exact-stages", "patches2", "patches3"),
    "compile": ("eager", "whole", "in-place", "blocks"),
    "compile order": ("compile-last", "compile-first"),
    "lora": ("no-lora", "lora-before", "lora-after", "lora-fused", "lora-fused-after", "lora-unloaded"),
    "offload": (
        "no-offload",
        *(f"{kind}-{when}" for kind in ("model", "group", "leaf") for when in ("before", "after")),
    ),
    "dtype": ("float32", "bfloat16"),
    "quantized": ("unquantized", "int8", "int8-late"),
    "sizes": ("size", "sizes"),
    "text": ("auto-text", "text-shard", "text-replicate"),
    "rotate": ("auto-rotate", "alltoall", "allgather", "2d", "gathered"),
    "verify": ("unverified", "verify"),
    "undo": ("parallel-off-first", "cache-off-first", "again"),
}

_AXIS_OF = {value: axis for axis, values in AXES.items() for value in values}
assert len(_AXIS_OF) == sum(map(len, AXES.values()))

MESH_DIMS = ("batch", "pipe", "ring", "ulysses", "tensor")


@dataclass(frozen=True)
class Case:
    """A value for each axis of :data:`AXES`."""

    values: tuple[str, ...]

    def __getitem__(self, axis: str) -> str:
        return self.values[_INDEX[axis]]

    @property
    def id(self) -> str:
        """Return the id that :func:`parse` reads: pipeline, mesh and values other than the default, joined by ``+``."""
        named = [
            value
            for (axis, values), value in zip(AXES.items(), self.values, strict=True)
            if axis in ("pipeline", "mesh") or value != values[0]
        ]
        return "+".join(named)

    @property
    def by_axis(self) -> dict[str, str]:
        return dict(zip(AXES, self.values, strict=True))

    @property
    def mesh(self) -> dict[str, int] | None:
        """Return the sizes by mesh dim, or None if the mesh argument is omitted."""
        if self["mesh"].startswith("auto"):
            return None
        sizes = dict.fromkeys(MESH_DIMS, 1)
        for part in self["mesh"].split("-"):
            sizes[part[:-1]] = int(part[-1])
        return sizes

    @property
    def ranks(self) -> int:
        if self.mesh is None:
            return int(self["mesh"][-1])
        ranks = 1
        for size in self.mesh.values():
            ranks *= size
        return ranks

    @property
    def is_one_way(self) -> bool:
        """Whether ranks get parts of the weights, which nothing undoes."""
        in_stages = self.mesh is not None and self.mesh["pipe"] > 1
        return in_stages or (self["weights"] in ("fsdp", "tensor") and self.ranks > 1)


_INDEX = {axis: index for index, axis in enumerate(AXES)}


def case_of(values: Mapping[str, str]) -> Case:
    """Return the case with these values, and defaults for the other axes."""
    return Case(tuple(values.get(axis, default[0]) for axis, default in AXES.items()))


def parse(text: str) -> Case:
    """Return the case with this id.

    Raises:
        ValueError: A value is unknown, or an axis has two values.
    """
    values: dict[str, str] = {}
    for value in text.split("+"):
        axis = _AXIS_OF.get(value)
        if axis is None:
            raise ValueError(f"{value!r} is no value of an option. Expected values of {AXES}, joined by +.")
        if axis in values:
            raise ValueError(f"{text!r} has two values of {axis!r}: {values[axis]!r} and {value!r}.")
        values[axis] = value
    return case_of(values)


@dataclass(frozen=True)
class Exclusion:
    """A combination that no case of the covering array holds.

    Args:
        values: the values that exclude each other, by axis. A case with one of them for each axis is excluded.
        reason: what is combined, or why the combination is meaningless.
        refused: whether para_core refuses it. Such a combination is run, and must be refused. Otherwise it is
            meaningless, or fails without para_core too.
    """

    reason: str
    values: Mapping[str, tuple[str, ...]]
    refused: bool = True

    def excludes(self, values: Mapping[str, str]) -> bool:
        return all(values.get(axis) in listed for axis, listed in self.values.items())


def other(axis: str, *values: str) -> tuple[str, ...]:
    """Return all values of ``axis`` except ``values``."""
    return tuple(value for value in AXES[axis] if value not in values)


_CACHE = other("cache", "uncached")
_COMPILED = other("compile", "eager")
_WHOLE = ("whole", "in-place")
_FUSED = other("pipefusion", "exact-stages")
_STAGES = tuple(mesh for mesh in AXES["mesh"] if "pipe" in mesh)
# All meshes except that of one process, which shards nothing.
_RANKS = other("mesh", "auto1")
_TENSOR = tuple(mesh for mesh in AXES["mesh"] if "tensor" in mesh)
# Without mesh=, weights="tensor" makes a mesh with a dim "tensor" of two ranks.
_SPLIT = (*_TENSOR, "auto2")

EXCLUSIONS: tuple[Exclusion, ...] = (
    # -- Combinations that mean nothing.
    Exclusion("an order of what is not there", {"cache": ("uncached",), "cache order": ("cache-first",)}, False),
    Exclusion("an order of what is not there", {"cache": ("uncached",), "undo": ("cache-off-first",)}, False),
    Exclusion("an order of what is not there", {"compile": ("eager",), "compile order": ("compile-first",)}, False),
    Exclusion("one process has no other to share heads with", {"weights": ("tensor",), "mesh": ("auto1",)}, False),
    # -- Combinations that fail without para_core too.
    Exclusion(
        "Dynamo does not trace the hooks of offload",
        {"compile": _WHOLE, "offload": other("offload", "no-offload")},
        False,
    ),
    Exclusion(
        "Dynamo does not trace the hooks of offload",
        {"compile": ("blocks",), "offload": ("group-before", "group-after", "leaf-before", "leaf-after")},
        False,
    ),
    Exclusion(
        "their classes name no repeated blocks",
        {"pipeline": ("cogvideox", "sd3", "mochi", "pixart"), "compile": ("blocks",)},
        False,
    ),
    Exclusion("its class takes no adapter of peft", {"pipeline": ("pixart",), "lora": other("lora", "no-lora")}, False),
    Exclusion(
        "peft does not fuse into quantized weights",
        {"lora": ("lora-fused", "lora-fused-after"), "quantized": ("int8",)},
        False,
    ),
    Exclusion(
        "diffusers refuses its model offload of what group offload moves",
        {"vae placement": ("vae-offload", "vae-first"), "offload": ("model-after",)},
        False,
    ),
    # -- Combinations that para_core refuses.
    Exclusion(
        "text='shard' of a model that needs all text tokens",
        {"pipeline": other("pipeline", "flux", "klein", "ltx", "qwen", "unet"), "text": ("text-shard",)},
    ),
    Exclusion("a cache on a UNet", {"pipeline": ("unet",), "cache": _CACHE}),
    Exclusion("stages of a UNet", {"pipeline": ("unet",), "mesh": _STAGES}),
    Exclusion("a compiled UNet", {"pipeline": ("unet",), "compile": _COMPILED}),
    Exclusion("PipeFusion of a UNet", {"pipeline": ("unet",), "pipefusion": _FUSED}),
    Exclusion("rotate_method= of a UNet", {"pipeline": ("unet",), "rotate": other("rotate", "auto-rotate")}),
    Exclusion("verify= of a UNet", {"pipeline": ("unet",), "verify": ("verify",)}),
    Exclusion("verify= with stages", {"mesh": _STAGES, "verify": ("verify",)}),
    Exclusion("verify= of PipeFusion", {"pipefusion": _FUSED, "verify": ("verify",)}),
    Exclusion("text= of a UNet", {"pipeline": ("unet",), "text": other("text", "auto-text")}),
    Exclusion(
        "weights='tensor' of a model without a tensor plan",
        {"pipeline": ("unet", "sd3", "pixart"), "weights": ("tensor",), "mesh": _SPLIT},
    ),
    Exclusion(
        "weights='fsdp', quantized afterwards", {"weights": ("fsdp",), "mesh": _RANKS, "quantized": ("int8-late",)}
    ),
    Exclusion("weights='fsdp' of int8 weights", {"weights": ("fsdp",), "mesh": _RANKS, "quantized": ("int8",)}),
    Exclusion("weights='tensor' of int8 weights", {"weights": ("tensor",), "mesh": _SPLIT, "quantized": ("int8",)}),
    Exclusion(
        "weights='tensor' on a mesh without 'tensor'", {"weights": ("tensor",), "mesh": other("mesh", *_SPLIT, "auto1")}
    ),
    Exclusion(
        "a mesh with 'tensor', without weights='tensor'", {"weights": other("weights", "tensor"), "mesh": _TENSOR}
    ),
    Exclusion("weights='fsdp' with stages", {"weights": ("fsdp",), "mesh": _STAGES}),
    Exclusion("weights='fsdp' without sequence ranks", {"weights": ("fsdp",), "mesh": ("batch2",)}),
    Exclusion("PipeFusion with tensor ranks", {"pipefusion": _FUSED, "weights": ("tensor",), "mesh": _SPLIT}),
    Exclusion("PipeFusion with a cache", {"pipefusion": _FUSED, "cache": _CACHE}),
    Exclusion(
        "PipeFusion of a model that makes tokens of its input", {"pipefusion": _FUSED, "pipeline": ("sd3", "pixart")}
    ),
    Exclusion("stages of a transformer that is compiled as a whole", {"mesh": _STAGES, "compile": _WHOLE}),
    Exclusion("PipeFusion of a transformer that is compiled as a whole", {"pipefusion": _FUSED, "compile": _WHOLE}),
    Exclusion(
        "a cache over sharded weights, compiled as a whole",
        {"weights": ("tensor",), "mesh": _SPLIT, "cache": _CACHE, "compile": _WHOLE},
    ),
    Exclusion("one graph over weights that FSDP2 shards", {"weights": ("fsdp",), "mesh": _RANKS, "compile": _WHOLE}),
    Exclusion("a cache over stages of two kinds of blocks", {"mesh": _STAGES, "cache": _CACHE, "pipeline": ("klein",)}),
    Exclusion("vae=True of a VAE on one rank", {"vae": ("vae",), "vae placement": ("vae-first",)}),
    Exclusion(
        "vae_placement= of a VAE that model offload moves",
        {"vae placement": ("vae-offload", "vae-first"), "offload": ("model-before",)},
    ),
    Exclusion("offload with stages", {"mesh": _STAGES, "offload": other("offload", "no-offload")}),
)


def exclusion_of(values: Mapping[str, str]) -> Exclusion | None:
    """Return the first exclusion that matches ``values``, or None if they may be combined."""
    return next((exclusion for exclusion in EXCLUSIONS if exclusion.excludes(values)), None)
