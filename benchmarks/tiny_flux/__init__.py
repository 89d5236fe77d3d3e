"""A small FLUX trained from scratch on drawn shapes, so that figures and pictures need no download."""
