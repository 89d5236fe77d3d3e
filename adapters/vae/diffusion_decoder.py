"""Run diffusion decoders on several ranks, each of which computes rows of the video.

The attention of these decoders sees a window around each pixel, so ranks fetch the rows of other ranks that
these windows cover. All other layers compute each token separately. Written for diffusers 0.42
`ltx2_diffusion_decoder.py`.

``families.py`` names :class:`DecoderRows` for the class, and ``run.py`` attaches it and enters
:meth:`DecoderRows.sharded` around each call. Tests: tests/spatial/test_diffusion_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.distributed.mesh import MeshDim
from para_core.instance.record import fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.layout.sequence import Run
from para_core.layout.windows import Sizes, bounds_of, divide_evenly
from para_core.spatial.fetch import fetch_rows, gather_rows, part_of
from para_core.spatial.row_tag import RowTag, set_rows


@lru_cache(maxsize=4096)
def find_windows(sizes: Sizes, kernel: int) -> tuple[Run, ...]:
    """Return the rows that the queries of each rank attend to, as a run (start, length).

    A window of ``kernel`` rows that would reach over the edge of the video is shifted inward.

    >>> find_windows((3, 3, 2), kernel=5)
    ((0, 5), (1, 7), (3, 5))
    """
    total = sum(sizes)

    def first(query: int) -> int:
        return max(min(query - kernel // 2, total - kernel), 0)

    runs = []
    for start, stop in bounds_of(sizes):
        end = min(first(stop - 1) + kernel, total)
        runs.append((first(start), end - first(start)))
    return tuple(runs)


class DecoderRows:
    """Wrappers that shard the rows (columns, if wider than high) of the video that a diffusion decoder
    computes.

    Each rank draws the noise of all rows, as a single device does, and keeps the noise of its own rows.
    """

    def __init__(self, ranks: MeshDim) -> None:
        self.ranks = ranks
        # The sharded dim of videos [B, C, T, H, W]. None if nothing is sharded.
        self._dim: int | None = None
        # The rows of each rank before upsampling, along that dim; None while no rows are sharded.
        self._rows: RowTag | None = None

    @staticmethod
    def parts(vae: nn.Module) -> list[nn.Module]:
        """Return the submodules of ``vae`` whose attention sees a window around each pixel."""
        return [part for part in vae.modules() if hasattr(part, "build_block_mask")]

    def attach(self, vae: Any) -> None:
        """Wrap the decoder methods of ``vae`` that take all rows, and its attention, which needs others' rows."""
        of_decoder: dict[str, Callable[..., Any]] = {
            "__call__": self._decode,
            "forward_stages_1_to_3": partial(self._stage, 0),
            "forward_stage_4": partial(self._stage, 1),
            "denoise": self._denoise,
        }
        fill_slot(vae.decoder, Slot.PARALLEL_VAE, of_decoder)
        of_attention: dict[str, Callable[..., Any]] = {
            "__call__": self._attend,
            "build_block_mask": self._block_mask,
        }
        fill_slots(self.parts(vae), Slot.PARALLEL_VAE, of_attention)

    @contextmanager
    def sharded(self, latents: Tensor) -> Iterator[None]:
        """Shard rows inside the ``with`` block. If ``latents`` has fewer rows than ranks, each rank decodes
        all.

        Raises:
            RuntimeError: The call is traced for a graph.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "the windows of a diffusion decoder reach into rows of other ranks, and their masks cannot be made in "
                "a graph. Call it uncompiled, or unparallelize_vae(vae)."
            )
        dim = 3
        if latents.shape[4] > latents.shape[3]:
            dim = 4
        self._dim = None
        if latents.shape[dim] >= self.ranks.size:
            self._dim = dim
        try:
            yield
        finally:
            self._dim = None

    @contextmanager
    def _rows_sharded(self, rows: RowTag) -> Iterator[None]:
        """Note inside the ``with`` block that each rank computes its ``rows`` of a video, before upsampling."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _decode(
        self,
        call: Callable[..., Any],
        decoder: Any,
        z: Tensor,
        /,
        generator: Any = None,
        num_inference_steps: int | None = None,
    ) -> Any:
        """Decode without tiling, like ``LTX2VideoDiffusionDecoder3d.forward``, and return this rank's rows.

        The methods that it calls are the wrapped ones below, which do not shard again while rows are sharded.
        """
        from diffusers.utils.torch_utils import randn_tensor

        if self._dim is None:
            return call(decoder, z, generator, num_inference_steps)
        dim, sizes = self._dim, divide_evenly(z.shape[self._dim], self.ranks.size)
        with self._rows_sharded(RowTag(dim, sizes)):
            own = part_of(z, RowTag(dim, sizes), self.ranks)
            context = decoder.forward_stage_4(decoder.forward_stages_1_to_3(own))
            # Tokens are [B, T, H, W, C] and videos [B, C, T, H, W], so the row dim of tokens is one less.
            rows = _scale(sizes, context.shape[dim - 1] // own.shape[dim] * decoder.patch_size)
            frames, height, width = context.shape[1:4]
            shape = [z.shape[0], decoder.out_channels, frames, height, width]
            shape[3:] = [size * decoder.patch_size for size in (height, width)]
            shape[dim] = sum(rows)
            noise = randn_tensor(tuple(shape), generator=generator, device=z.device, dtype=z.dtype)
            noise = part_of(noise, RowTag(dim, rows), self.ranks).clone()
            video = decoder.denoise(
                context, noise, num_inference_steps or decoder.default_num_inference_steps
            )
        return set_rows(video, RowTag(dim, rows))

    # -- The following methods run on the tiles of a tiled decode. Each takes and returns all rows of a tile.

    def _stage(
        self, before: int, call: Callable[..., Tensor], decoder: Any, x: Tensor, /, **options: Any
    ) -> Tensor:
        """Return ``call(decoder, x)``, tokens ``[B, T, H, W, C]``, computed with sharded rows and gathered.
        Collective, unless rows are sharded already.

        The row dim of ``x`` is that of a video ``[B, C, T, H, W]`` minus ``before``: 0 for latents, 1 for
        tokens.
        """
        if self._dim is None or self._rows is not None or x.shape[self._dim - before] < self.ranks.size:
            return call(decoder, x, **options)
        rows = RowTag(self._dim - before, divide_evenly(x.shape[self._dim - before], self.ranks.size))
        with self._rows_sharded(rows.at(self._dim)):
            tokens = call(decoder, part_of(x, rows, self.ranks), **options)
        scale = tokens.shape[self._dim - 1] // rows.sizes[self.ranks.index]
        return gather_rows(tokens, RowTag(self._dim - 1, _scale(rows.sizes, scale)), self.ranks)

    def _denoise(
        self,
        call: Callable[..., Any],
        decoder: Any,
        context: Tensor,
        x_t: Tensor,
        /,
        num_inference_steps: int,
    ) -> Tensor:
        """Return all rows of the video of a tile, computed with sharded rows and gathered. Collective, unless
        rows are sharded already.

        Args:
            context: Tokens ``[B, T, H, W, C]``.
            x_t: Noise ``[B, C, T, H * patch_size, W * patch_size]``.
        """
        dim = self._dim
        if dim is None or self._rows is not None or context.shape[dim - 1] < self.ranks.size:
            video: Tensor = call(decoder, context, x_t, num_inference_steps)
            return video
        sizes = divide_evenly(context.shape[dim - 1], self.ranks.size)
        pixels = RowTag(dim, _scale(sizes, decoder.patch_size))
        with self._rows_sharded(RowTag(dim, sizes)):
            own = part_of(context, RowTag(dim - 1, sizes), self.ranks), part_of(x_t, pixels, self.ranks)
            video = call(decoder, *own, num_inference_steps)
        return gather_rows(video, pixels, self.ranks)

    # -- The attention modules get this rank's rows, and need rows of other ranks.

    def _attend(self, call: Callable[..., Any], module: Any, x: Tensor, /, block_mask: Any = None) -> Tensor:
        """Fetch the rows that the windows of this rank's rows cover, attend, and return the output of this
        rank's rows. Collective while rows are sharded.

        Counting positions from the first fetched row is exact: attention depends on differences of positions
        only.
        """
        if self._rows is None:
            out: Tensor = call(module, x, block_mask)
            return out
        rows = self._rows_of(x, self._rows)
        wanted = find_windows(rows.sizes, module.kernel_size[rows.dim - 1])
        out = call(module, fetch_rows(x, rows, wanted, self.ranks), block_mask)
        rank = self.ranks.index
        return out.narrow(rows.dim, bounds_of(rows.sizes)[rank][0] - wanted[rank][0], rows.sizes[rank])

    def _block_mask(self, call: Callable[..., Any], module: Any, x: Tensor, /) -> Any:
        """Return the block mask for the rows that :meth:`_attend` fetches, instead of for the rows of ``x``."""
        if self._rows is None:
            return call(module, x)
        rows = self._rows_of(x, self._rows)
        _, length = find_windows(rows.sizes, module.kernel_size[rows.dim - 1])[self.ranks.index]
        shape = [*x.shape[: rows.dim], length, *x.shape[rows.dim + 1 :]]
        return call(module, x.new_empty(()).expand(shape))

    def _rows_of(self, x: Tensor, before: RowTag) -> RowTag:
        """Return the sharding of tokens ``[B, T, H, W, C]`` of this rank at any level of upsampling.
        ``before`` is that of a video before it.
        """
        dim = before.dim - 1
        return RowTag(dim, _scale(before.sizes, x.shape[dim] // before.sizes[self.ranks.index]))


def _scale(sizes: Sizes, factor: int) -> Sizes:
    return tuple([rows * factor for rows in sizes])
