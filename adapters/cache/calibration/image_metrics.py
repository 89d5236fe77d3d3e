"""Image metrics: PSNR, SSIM and LPIPS, for images or video frames ``[N, H, W, C]`` with values in 0 … 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

# Images of all generations: one tensor [N, H, W, C] per generation, because image sizes may differ between them.
Images = Sequence[Tensor]
ImageMetric = Callable[[Images, Images], float]


def as_images(output: Any) -> Tensor:
    """Convert a pipeline's output of ``output_type="np"`` to images or video frames ``[N, H, W, C]``, float32."""
    values = torch.stack([torch.as_tensor(x) for x in output]).float()
    return values.reshape(-1, *values.shape[-3:])


def psnr(images: Images, references: Images) -> float:
    """Return the peak signal-to-noise ratio in dB, from the mean squared error over all images; ``inf`` if all equal.

    Ratios of single images are not averaged, because one unchanged image would make their mean infinite.
    """
    pairs = zip(images, references, strict=True)
    error = torch.cat([(x.double() - y.double()).square().mean(dim=(1, 2, 3)) for x, y in pairs]).mean().item()
    return math.inf if error == 0.0 else -10.0 * math.log10(error)


def load_metric(name: str) -> ImageMetric:
    """Return the function that computes the metric ``name``: ``"psnr"``, ``"ssim"`` or ``"lpips"``.

    Raises ``ImportError`` if its package is not installed, and ``RuntimeError`` if its weights cannot be loaded.
    """
    return {"psnr": lambda: psnr, "ssim": _load_ssim, "lpips": _load_lpips}[name]()


def _load_ssim() -> ImageMetric:
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise ImportError(
            "metric='ssim' needs scikit-image: pip install scikit-image. metric='psnr' needs nothing."
        ) from error

    def ssim(images: Images, references: Images) -> float:
        """Return the mean structural similarity of all images, with the window and constants of Wang et al., 2004."""
        options = {"channel_axis": -1, "data_range": 1.0, "gaussian_weights": True, "use_sample_covariance": False}
        pairs = _pairs(images, references)
        return fmean([float(structural_similarity(x.numpy(), y.numpy(), sigma=1.5, **options)) for x, y in pairs])

    return ssim


def _load_lpips() -> ImageMetric:
    try:
        import lpips
    except ImportError as error:
        raise ImportError(
            "metric='lpips' needs the package lpips (pip install lpips), which downloads weights when it is first "
            "used. metric='ssim' and metric='psnr' need none."
        ) from error
    try:
        network = lpips.LPIPS(net="alex", verbose=False)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"lpips could not load the weights of AlexNet: {error}. Without a network, put alexnet-owt-7be5be79.pth "
            f"into {torch.hub.get_dir()}/checkpoints, or take metric='ssim' or 'psnr'."
        ) from error

    def distance(images: Images, references: Images) -> float:
        """Return the LPIPS distance with AlexNet, averaged over all images."""

        def prepared(x: Tensor) -> Tensor:
            return x.movedim(-1, 0)[None] * 2 - 1

        with torch.no_grad():
            return fmean(network(prepared(x), prepared(y)).item() for x, y in _pairs(images, references))

    return distance


def _pairs(images: Images, references: Images) -> list[tuple[Tensor, Tensor]]:
    return [pair for x, y in zip(images, references, strict=True) for pair in zip(x, y, strict=True)]
