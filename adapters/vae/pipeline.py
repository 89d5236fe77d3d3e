"""Run the autoencoders of a parallel pipeline on all its ranks: the option ``vae`` of parallelize_pipe.

``adapters/weights/features.py`` finds :data:`FEATURE`. The work is done by ``vae.py``; autoencoders in host
memory are in ``adapters/weights/vae_offload.py``. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from para_core.adapters.inspect.components import vaes_of
from para_core.adapters.registry import DIFFUSION_DECODER, decoders_of
from para_core.adapters.vae.families import require_parallel_vae, vae_adapter
from para_core.adapters.vae.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.private_class import original_class


class ParallelVae(FeatureChange):
    """The change that runs one autoencoder of a pipeline on all ranks of ``mesh``.

    Args:
        vae: The autoencoder.
        mesh: Ranks that compute its rows, along all dims.
        same_bits: Whether its result has the bytes of one process.
    """

    name = "the VAE"

    def __init__(self, vae: nn.Module, mesh: GuidedMesh, *, same_bits: bool) -> None:
        self.vae, self.mesh, self.same_bits = vae, mesh, same_bits

    def apply(self) -> None:
        parallelize_vae(self.vae, mesh=self.mesh, same_bits=self.same_bits)

    def undo(self) -> None:
        unparallelize_vae(self.vae)


def parallel_vaes(request: ChangeRequest) -> list[ParallelVae]:
    """Return the changes of a request with ``vae=True``, and of a pipeline that only decodes; none on one
    rank.

    Raises:
        TypeError: The pipeline has no autoencoder, or its class is not supported.
        ValueError: The class cannot have the bytes of one process, and ``same_bits`` asks for them.
        RuntimeError: A method of the autoencoder was replaced on the instance.
    """
    if request.options.get("vae"):
        vaes = _parallel_vaes_of(request.owner)
    else:
        vaes = list(decoders_of(request.owner).values())
    same_bits = bool(request.options.get("same_bits"))
    for vae in vaes:
        require_parallel_vae(vae, same_bits=same_bits)
    if request.mesh.ranks == 1:
        return []
    return [ParallelVae(vae, request.mesh, same_bits=same_bits) for vae in vaes]


def _parallel_vaes_of(pipe: Any) -> list[nn.Module]:
    """Return the autoencoders of ``pipe`` that run on all ranks: those with an adapter, ``pipe.vae`` first.

    For a pipeline that only decodes, these are its decoders.

    Raises:
        TypeError: There is no ``pipe.vae``.
    """
    if decoders := decoders_of(pipe):
        return list(decoders.values())
    vaes = vaes_of(pipe)
    if "vae" not in vaes:
        raise TypeError(
            f"vae=True: {original_class(pipe).__name__} has no autoencoder pipe.vae. Leave vae=True out."
        )
    others = [part for name, part in vaes.items() if name != "vae"]
    others += [part for part in [getattr(pipe, DIFFUSION_DECODER, None)] if isinstance(part, nn.Module)]
    # An audio autoencoder without an adapter is left out, so every rank decodes all the audio, which takes
    # little time.
    return [vaes["vae"], *[part for part in others if vae_adapter(part) is not None]]


FEATURE = Feature(option="vae", changes=parallel_vaes)
