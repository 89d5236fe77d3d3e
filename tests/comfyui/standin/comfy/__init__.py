"""Stand-in for ComfyUI: the interfaces that the node pack uses, and a sampler of a few lines."""
