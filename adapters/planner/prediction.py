"""The prediction of one mesh: seconds, bytes, memory, the reason why it cannot run, and the code that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.weights import Placement
from para_core.option_values import TextEncoders


@dataclass(frozen=True)
class Prediction:
    """The prediction of one mesh.

    Args:
        shape (`MeshShape`): The mesh.
        placement (`Placement`): Where the weights are that the mesh does not shard.
        step (`float`): Seconds of one step with all CFG branches.
        seconds (`float`): Seconds of the whole generation.
        sent (`float`): Bytes that the first rank sends per step.
        memory (`float`): Peak bytes of device memory, of the rank that uses most.
        room (`float`): Bytes of device memory that a rank can use for weights and activations.
        host_memory (`float`): Bytes of weights that each rank keeps in host memory.
        problem (`str`): The reason why the mesh cannot run; empty if it can.
        why (`str`): The reason why another mesh is chosen; empty for the chosen mesh.
    """

    shape: MeshShape
    placement: Placement
    step: float
    seconds: float
    sent: float
    memory: float
    room: float
    host_memory: float
    problem: str = ""
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the mesh fits into device memory."""
        return self.memory <= self.room

    @property
    def runs(self) -> bool:
        """Whether the mesh can run and fits into device memory."""
        return not self.problem and self.fits

    def __str__(self) -> str:
        """Return a short description: the mesh dims with several ranks, the ring method, and where the weights are."""
        placement, words = self.placement, [str(self.shape)]
        if placement.encoders != default_text_encoders(self.shape):
            words.append(f"text encoders {placement.encoders}")
        if placement.vae_waits:
            words.append(f"VAE {placement.vae}")
        if placement.resident is not None:
            words.append(f"blocks offloaded ({placement.resident} resident)")
        if placement.takes_turns:
            words.append("components offloaded")
        if placement.quantize is not None:
            words.append(f"{placement.quantize} (not exact)")
        return ", ".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallelize_pipe`` for this mesh, except ``mesh``.

        With components that take turns on the device there are none: that is a method of the pipeline.
        """
        return self.options_beside(default_text_encoders(self.shape))

    def options_beside(self, encoders: TextEncoders) -> dict[str, Any]:
        """Return :attr:`options` for a caller that places text encoders as ``encoders`` says by default."""
        shape, placement, options = self.shape, self.placement, dict[str, Any]()
        if shape.ring_method != "rotate":
            options["rotate_method"] = shape.ring_method
        if shape.fsdp:
            options["weights"] = "fsdp"
        elif shape.tensor > 1:
            options["weights"] = "tensor"
        if placement.encoders != encoders:
            options["text_encoders"] = placement.encoders
        if placement.vae_waits:
            options["vae_placement"] = placement.vae
        if placement.resident is not None:
            options |= {"offload": "blocks", "resident_blocks": placement.resident}
        return options

    @property
    def mesh_options(self) -> dict[str, int]:
        """The keyword arguments of ``init_context_parallel_mesh`` for this mesh."""
        sizes = self.shape.sizes
        return {
            f"max_{name}_dim_size": n for name, n in sizes.items() if n > 1 or name in ("ring", "ulysses")
        }

    @property
    def code(self) -> str:
        """The line of code that runs a pipeline ``pipe`` on this mesh."""
        quantized = self.placement.quantize
        if self.placement.takes_turns:
            return "pipe.enable_model_cpu_offload()  # one component at a time is on the device"
        if quantized is not None:
            return f"# {quantized}: para_core generate --quantize {quantized}, or from_pretrained_sharded(quantize=)"
        if self.shape.ranks == 1 and not self.options:
            return "pipe = pipe  # one device: unchanged"
        arguments = [f"{name}={value!r}" for name, value in self.options.items()]
        if self.shape.ranks > 1:
            sizes = ", ".join(f"{name}={size}" for name, size in self.mesh_options.items())
            arguments.insert(0, f"mesh=init_context_parallel_mesh({sizes})")
        return f"parallelize_pipe({', '.join(['pipe', *arguments])})"


def default_text_encoders(shape: MeshShape) -> Literal["replicate", "fsdp"]:
    """Return the placement of text encoders that ``parallelize_pipe`` chooses by default on this mesh."""
    if shape.tensor > 1 or shape.fsdp:
        return "fsdp"
    return "replicate"
