"""Apply First Block Cache to diffusers pipelines, and calibrate its threshold."""
