"""Many prompts, many requests: one group of ranks here, or replicas of it on Ray. Only ``group``, ``batch`` and ``serving`` import Ray."""
