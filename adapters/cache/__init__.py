"""Apply First Block Cache to diffusers pipelines."""
