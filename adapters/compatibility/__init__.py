"""Check whether para_core can run a model with the diffusers and accelerate features that are active on it."""
