"""A small FLUX trained from scratch on drawn shapes, so that figures and images need no download."""
