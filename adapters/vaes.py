"""Find the autoencoders of a pipeline.

Autoencoders run once per generation, not once per step. The option ``vae_placement=`` therefore says where their
weights are kept, apart from the options for the transformer's weights.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import nn

from para_core.adapters.components import VaePlacement
from para_core.instance_patching import original_class, uncompiled

VAE_PLACEMENTS: tuple[VaePlacement, ...] = get_args(VaePlacement)
# Methods by which pipelines call an autoencoder. Pipelines also call vocoders, as modules, but vae_placement= does not
# move these, because they are small.
VAE_METHODS = ("encode", "decode")
# Names of the autoencoders for sound, in pipelines that also generate sound.
SOUND_VAES = ("audio_vae", "sound_tokenizer")


def vaes_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the autoencoders of ``pipe`` by name, ``vae`` first, each without the wrapper of ``torch.compile``."""
    parts = {name: uncompiled(getattr(pipe, name, None)) for name in ("vae", *SOUND_VAES)}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def require_vae(pipe: Any, placement: VaePlacement) -> None:
    """Raise ``ValueError`` if ``pipe`` has no autoencoder to place."""
    if not vaes_of(pipe):
        raise ValueError(
            f"vae_placement={placement!r}: this {original_class(pipe).__name__} has no autoencoder. Leave it out."
        )
