"""The families of autoencoders: all that is particular to a class, and the reasons why others are refused.
Written for diffusers 0.42.

``run.py`` reads the adapters, ``vae.py`` and ``pipeline.py`` ask whether a class is supported, and
``call_check.py`` and ``vae_compile.py`` which settings of tiles count. UNets are in
``adapters/models/unets.py``. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.vae.diffusion_decoder import DecoderRows
from para_core.distributed.mesh import MeshDim
from para_core.instance.private_class import original_class

VaeMethod = Literal["exact", "tiled"]

# Names of the first parameter of the methods that encode and decode. They cannot be read from the signatures,
# because diffusers decorates some of the methods with functions of ``*args, **kwargs``.
INPUT_NAMES = ("x", "z", "sample", "latents")


class FamilyRows(Protocol):
    """Wrappers of the parts of an autoencoder whose rows the sharding mode cannot compute."""

    def __init__(self, ranks: MeshDim) -> None: ...

    @staticmethod
    def parts(vae: nn.Module) -> Sequence[nn.Module]:
        """Return the submodules that are wrapped, besides the encoder and the decoder."""

    def attach(self, vae: Any) -> None:
        """Wrap the parts of ``vae`` that need rows of other ranks."""

    def sharded(self, latents: Tensor) -> AbstractContextManager[None]:
        """Return a context in which the parts compute this rank's rows.

        Raises:
            RuntimeError: The call is traced for a graph.
        """


@dataclass(frozen=True)
class VaeAdapter:
    """Description of one autoencoder class, ``vae``.

    Args:
        encode, decode: Names of the methods to parallelize, which take and return images ``[..., H, W]``.
            Each is the innermost method inside which all decisions by the image's size are made, such as
            whether to tile. Methods around it may only split the batch (slicing). ``encode`` is None for a
            class that only decodes.
        tiled: Names of the methods that split an image into tiles, run the encoder or decoder on each tile,
            and blend the results; empty without tiling.
        only_tiled: Whether the class always tiles.
        why_not_tiles: Why the tiles cannot be distributed over ranks; empty if they can.
        begins_tile: Name of the method that the class calls at the beginning of each tile; empty if none.
        forgets_frames: Name of the method that drops the frames that its modules store; empty if none does.
        rows: Computes rows in place of the sharding mode; None to use the mode.
    """

    vae: str
    encode: str | None = "_encode"
    decode: str = "_decode"
    tiled: tuple[str, ...] = ("tiled_encode", "tiled_decode")
    only_tiled: bool = False
    why_not_tiles: str = ""
    begins_tile: str = ""
    forgets_frames: str = ""
    rows: type[FamilyRows] | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods to parallelize: ``encode``, if there is one, and ``decode``."""
        if self.encode is None:
            return (self.decode,)
        return (self.encode, self.decode)

    @property
    def distributes_tiles(self) -> bool:
        """Whether the tiles can be distributed over ranks."""
        return not self.why_not_tiles


_KL = ("tiled_encode", "_tiled_encode", "tiled_decode")
_CACHED_FRAMES = "a tile stores its last frames in its modules for the next call"
# Classes for which the defaults of VaeAdapter are right.
_USUAL = (
    "AutoencoderDC",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLHunyuanImageRefiner",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi",
)
# Classes that clear a cache of frames before each tile.
_CLEARING = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")
# Classes whose methods have the usual names, and that have no tiling.
_UNTILED = (
    "AutoencoderKLCosmos",
    "AutoencoderKLKVAEAudio",
    "AutoencoderKLKVAEVideo",
    "AutoencoderKLLTX2Audio",
)
# Classes that encode and decode in the public methods themselves, and have no tiling.
_WITH_ENCODE = (
    "AutoencoderKLMiniMaxH3Audio",
    "AutoencoderKLTemporalDecoder",
    "Kandinsky6SRVAE",
    "LongCatAudioDiTVae",
)
_ADAPTERS = (
    *map(VaeAdapter, _USUAL),
    *[VaeAdapter(vae, begins_tile="clear_cache") for vae in _CLEARING],
    *[VaeAdapter(vae, tiled=()) for vae in _UNTILED],
    *[VaeAdapter(vae, encode="encode", decode="decode", tiled=()) for vae in _WITH_ENCODE],
    VaeAdapter("AutoencoderKL", tiled=_KL),
    VaeAdapter("AutoencoderKLAllegro", only_tiled=True),
    VaeAdapter("AutoencoderKLFlux2", tiled=_KL),
    VaeAdapter("AutoencoderKLKVAE", tiled=("_tiled_encode", "tiled_decode")),
    VaeAdapter("AutoencoderKLMagvit", why_not_tiles=_CACHED_FRAMES, forgets_frames="_clear_conv_cache"),
    # This class tiles by default. If the user turns tiling off, its decoder concatenates tokens of rows with
    # other tokens. Rows cannot be sharded then, so the call raises MixesRows.
    VaeAdapter("AutoencoderKLMiniMaxH3", tiled=("_encode_clip", "_decode_clip")),
    # A waveform [B, C, length] has no rows; its samples are sharded instead.
    VaeAdapter(
        "AutoencoderOobleck",
        tiled=("_tiled_encode", "_tiled_decode"),
        why_not_tiles="it reads each tile's length immediately",
    ),
    VaeAdapter(
        "AutoencoderTiny",
        encode="encode",
        decode="decode",
        tiled=("_tiled_encode", "_tiled_decode"),
        why_not_tiles="it blends each tile immediately",
    ),
    VaeAdapter("AutoencoderVidTok", why_not_tiles=_CACHED_FRAMES),
    VaeAdapter("Cosmos3AVAEAudioTokenizer", decode="decode", tiled=()),
    VaeAdapter(
        "LTX2VideoDiffusionDecoderModel",
        encode=None,
        decode="decode",
        tiled=("tiled_decode",),
        why_not_tiles="it draws the noise of each tile after that of the tile before",
        rows=DecoderRows,
    ),
)
VAES: Mapping[str, VaeAdapter] = {adapter.vae: adapter for adapter in sorted(_ADAPTERS, key=lambda x: x.vae)}

# Other autoencoders of diffusers, each with the reason why its rows are not sharded.
REFUSED_VAES: Mapping[str, str] = {
    "AsymmetricAutoencoderKL": "its decoder also takes a mask and an image, whose rows would have to be sharded "
    "equally",
    "AutoencoderRAE": "its encoder and decoder are transformers of one small size, which concatenate a global token "
    "with those of rows",
    "AutoencoderSAME": "a transformer over a waveform, which doubles the number of tokens and folds them into chunks",
    "ConsistencyDecoderVAE": "it draws noise at every step of its own denoising loop",
    "MMAudioVAE": "it encodes a Fourier transform over all samples; its decoder makes a spectrogram of 8 s, which is "
    "small",
    "RFD4ProteinaAutoencoder": "it encodes proteins, which have no rows",
    "VQModel": "it looks up codes by the position of each pixel",
}


def vae_adapter(vae: Any) -> VaeAdapter | None:
    """Return the adapter for the class of ``vae``; None if there is none."""
    return VAES.get(original_class(vae).__name__)


def parts_of(vae: nn.Module) -> list[nn.Module]:
    """Return the submodules of ``vae`` whose calls are wrapped."""
    named = [getattr(vae, name, None) for name in ("encoder", "decoder")]
    parts = [part for part in named if isinstance(part, nn.Module)]
    adapter = vae_adapter(vae)
    if adapter is not None and adapter.rows is not None:
        parts += adapter.rows.parts(vae)
    return parts


def tiling_settings(vae: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``vae`` that say how it tiles and slices images, such as ``use_tiling``.

    The prefixes are those of all such attributes in diffusers. Ranks compare the settings in each call, and a
    graph is compiled for each.
    """
    return {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))}


def rows_per_latent(vae: Any) -> int:
    """Return the number of pixel rows (or sound samples) per latent row, from the config or attributes of ``vae``.

    Every class of ``VAES`` that encodes tells a ratio or the levels of its encoder;
    tests/spatial/test_vaes.py tries all. Raises ``StopIteration`` for one that tells neither.
    """
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


def require_parallel_vae(
    module: nn.Module, method: VaeMethod = "exact", *, same_bits: bool = False
) -> VaeAdapter:
    """Return the adapter of the autoencoder ``module``.

    Raises:
        TypeError: The class is not supported.
        ValueError: The tiles of the class cannot be distributed and ``method`` is ``"tiled"``; or it computes
            rows in its own way and ``same_bits`` is True.
        RuntimeError: A method that must be wrapped was replaced on the instance.
    """
    adapter = vae_adapter(module)
    if adapter is None:
        check_not_fsdp1(module, "vae")
        check_not_wrapped(module, "vae")
        name = original_class(module).__name__
        reason = REFUSED_VAES.get(name, "para_core has no adapter for it")
        raise TypeError(f"{name} does not run on several ranks: {reason}. Supported are {', '.join(VAES)}.")
    if method == "tiled" and not (adapter.tiled and adapter.distributes_tiles):
        reason = adapter.why_not_tiles or "diffusers has no tiling for it"
        raise ValueError(f"the tiles of {adapter.vae} cannot be distributed: {reason}. Use method='exact'.")
    if same_bits and adapter.rows is not None:
        raise ValueError(
            f"same_bits=True: {adapter.vae} computes its rows in its own way, which adds up in another order than one "
            "process does. Leave same_bits out."
        )
    replaced = next((name for name in adapter.methods if name in vars(module)), None)
    if replaced is not None:
        raise RuntimeError(
            f"{adapter.vae}.{replaced} is set on this instance, and would be called instead of the method that runs on "
            "several ranks. Compile it after parallelize_vae, or delete the attribute."
        )
    return adapter
