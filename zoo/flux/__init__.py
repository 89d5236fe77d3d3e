"""A small FLUX trained from scratch on drawn shapes, so that figures and images need no download."""

from pathlib import Path

PIPELINE = Path(__file__).parent / "pipeline"
