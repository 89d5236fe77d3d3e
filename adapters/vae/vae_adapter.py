"""Look up what the table of autoencoders says about one of them."""

from __future__ import annotations

from typing import Any

from para_core.adapters.models.vaes import VAES
from para_core.adapters.row_adapter import VaeAdapter
from para_core.instance.private_class import original_class


def rows_per_latent(vae: Any) -> int:
    """Return the number of pixel rows (or sound samples) per latent row, from the config or attributes of ``vae``."""
    config = vae.config
    # Use vars() instead of getattr(), because the getattr of diffusers also looks in the config, and then
    # warns.
    attributes = [vars(vae).get(name) for name in ("spatial_compression_ratio", "hop_length", "_hop_size")]
    for ratio in (config.get("spatial_compression_ratio"), config.get("downsampling_ratio"), *attributes):
        if ratio is not None:
            return int(ratio)
    levels = next(
        config[name]
        for name in ("block_out_channels", "encoder_block_out_channels", "ch_mult")
        if name in config
    )
    return int(2 ** (len(levels) - 1))


def vae_adapter(vae: Any) -> VaeAdapter | None:
    """Return the adapter for the class of ``vae``; None if there is none."""
    return VAES.get(original_class(vae).__name__)
