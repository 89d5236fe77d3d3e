"""Calibration of the cache's threshold, and the image metrics that it uses."""
