"""Opt-in attention that is not exact: each head attends to some of the keys, or tensors are sent in 8 bits.

Exact attention imports this package only if one of these options is set.
"""
