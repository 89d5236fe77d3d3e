"""What para_core knows about diffusers pipelines."""
