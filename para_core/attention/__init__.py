"""Compute one attention call over a mesh: Ulysses, ring, Attention2D, masks, and attention on one device."""
