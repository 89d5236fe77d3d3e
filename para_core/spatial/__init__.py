"""Rows of an image over ranks: what a convolution, a norm or a resampling needs from other ranks is fetched, by interception."""
