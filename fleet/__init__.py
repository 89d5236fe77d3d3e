"""Many prompts, many requests: one group of ranks here, or replicas of it on Ray. Only ``on_ray`` and ``server`` import Ray."""
