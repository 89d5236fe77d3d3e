"""Torch function modes that intercept attention calls. :mod:`para_core.attention` computes the intercepted calls."""
