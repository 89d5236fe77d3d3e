"""Modes: which calls are intercepted. How attention is computed is in :mod:`para_core.attention`."""
