"""First Block Cache on diffusers pipelines."""
