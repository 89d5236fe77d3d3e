"""Opt-in attention that is not exact: each head attends to some of the keys.
Exact attention does not import it.
"""
