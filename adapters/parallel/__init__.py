"""Run a pipeline, a transformer or a UNet of diffusers on the ranks of a mesh."""
